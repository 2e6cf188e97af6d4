"""Reading image and sound files."""
