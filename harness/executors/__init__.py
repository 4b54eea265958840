"""Where jobs run: in this process, on this machine's devices, or on a Ray cluster."""
