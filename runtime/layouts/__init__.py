"""`noria layouts`: layouts of a model compared, measured on the compiler and checked for truth."""
