"""The lowest room: devices and their array libraries, threads over rows, random bits. The only importer of CuPy."""
