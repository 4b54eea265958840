"""Public kernels that do a region's job, one library function a file; see `peer`."""
