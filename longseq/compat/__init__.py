"""Every use of a private or fragile interface of a library: one file per library, with tests in tests/compat.

A library may change such an interface in any release. If it breaks something, look here first.
"""
