"""The profiler: layers, operators and memory measured on a device, through the native executor."""
