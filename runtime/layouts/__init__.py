"""The work of `noria layouts`: tables and pictures of layouts, and checks of their logits."""
