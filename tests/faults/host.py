"""torchrun on a host that is a network namespace: host.py NAMESPACE ARGUMENTS."""

import ctypes
import os
import sys

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main

if __name__ == "__main__":
    namespace = os.open(f"/var/run/netns/{sys.argv[1]}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), f"setns {sys.argv[1]}")
    # torchrun looks its callers up among all imported modules for a log that nobody reads; in a fork of the tests these
    # are so many that it takes seconds
    dynamic_rendezvous.get_method_name = lambda: "unknown"
    main(sys.argv[2:])
