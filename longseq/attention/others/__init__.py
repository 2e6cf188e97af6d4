"""Other systems that mix the tokens of long sequences, behind the same seam; longseq.attention exports them."""
