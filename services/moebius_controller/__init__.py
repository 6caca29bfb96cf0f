"""The health controller: decides, from what it observes, what to do about workers that are not well.

`decide` is a pure function over the plain data of `types`, with the ladder of `policy` and the memory of
`history`; `control` is the loop that feeds it. `local` and `kubernetes` are drivers: they observe and act on
processes of this machine, and on pods.
"""
