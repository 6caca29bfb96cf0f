"""What services need of the Kubernetes API: how to reach it, objects kept current in memory, pods as data."""
