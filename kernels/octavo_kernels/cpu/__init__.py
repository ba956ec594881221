"""Native kernels for CPUs, in C. `ops` uses them where they can do what is asked, else the reference."""
