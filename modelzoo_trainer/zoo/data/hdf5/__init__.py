"""Token rows in HDF5 files, as the Model Zoo preprocesses them."""
