"""The systems that longseq is compared with, as mechanisms too; longseq.attention exports them."""
