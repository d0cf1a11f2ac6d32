"""The wire format: messages, checksums, bit packing, entropy coding."""
