"""Measurements that write a table and a picture; each is a command, and a module of the same name."""
