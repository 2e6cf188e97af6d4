"""Users' own files: folders of classes, and tables."""
