"""`moebius bench`: what an endpoint that speaks OpenAI's API does under load.

endpoint.py  what it serves and which parameters it takes; how long prompts must be
prompts.py   prompts of a length, with nothing in common
stream.py    one request, and when each piece of its answer arrived
load.py      many of them: closed loop and open loop
sweep.py     level after level: warm, load, measure
measure.py   the statistics
result.py    what is measured, as data and as JSON
progress.py, report.py, compare.py, plot.py   for people
command.py   the command line
"""
