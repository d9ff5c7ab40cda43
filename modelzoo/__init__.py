"""Model definitions in Flax NNX. Knows logical axis names; knows no mesh, bucket or file."""
