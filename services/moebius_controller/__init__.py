"""The health controller: decides, from what it observes, what to do about workers that are not well.

`decide` is a pure function over plain data; `control` is the loop that feeds it; `local` is the driver that
observes and acts on processes of this machine. A driver for Kubernetes needs to offer the same three methods.
"""
