"""The driver for pods.

`observe` makes observations of pods, nodes and what workers answer; `actions` says to the API what is to be
done; `lease` finds out who may; `memory` keeps the controller's state. All that waits for the API runs in
threads, and nothing here waits for it to look.
"""
