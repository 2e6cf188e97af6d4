"""Every use of a private or fragile interface of a library: one file a library, and a test in tests/compat for each.

What a library does not promise may change with any of its releases. Then these files are where to look.
"""
