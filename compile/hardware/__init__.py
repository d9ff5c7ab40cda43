"""The peaks and links of devices, and the shares of the peaks that programs reach."""
