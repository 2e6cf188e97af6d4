"""Commands that measure something and write a table and a figure. Each has a module of its name."""
