"""The model worker: a gRPC front without torch, and the engine process behind it that owns the device."""
