"""The engine process: receives requests, schedules, computes, samples, sends. Owns the device."""
