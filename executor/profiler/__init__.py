"""The profiler: measures layers, operators, memory and links through the native executor."""
