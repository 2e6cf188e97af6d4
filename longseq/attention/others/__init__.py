"""Other systems behind the same seam as Linformer and Verma, one file each."""
