"""Plain-torch twins of the kernels: any device, as short as the equations."""
