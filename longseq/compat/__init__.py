"""Every use of a private or fragile interface of a library: one file per library, and a test in tests/compat for each.

A library may change such an interface in any release. Then look into these files first.
"""
