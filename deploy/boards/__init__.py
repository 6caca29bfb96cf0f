"""The dashboards: a module for each, in plain data.

`panels` says what they are made of, `grafana` writes the JSON that Grafana reads.
"""
