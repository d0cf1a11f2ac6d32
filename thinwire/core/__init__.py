"""Trees of named tensors, specs, shared randomness, the registry of parts and plugins."""

from thinwire.core import plugins as plugins
