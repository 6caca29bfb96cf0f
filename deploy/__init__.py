"""What runs beside Moebius: what Prometheus scrapes and alerts on, and what Grafana shows.

catalog       the metrics of all services, read from their code
metrics_page  writes docs/metrics.md from it
boards        the dashboards, as code; dashboards/ holds the JSON that Grafana reads
render        draws a dashboard from a live Prometheus, to be looked at without Grafana
rules         recording and alerting rules, and their tests
local         a Prometheus for `moebius up`
"""
