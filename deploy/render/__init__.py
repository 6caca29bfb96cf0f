"""Pictures of the dashboards from a live Prometheus, to be looked at without Grafana."""
