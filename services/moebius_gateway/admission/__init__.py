"""Who may begin, and when: a bounded queue in front of the dispatcher, fair among clients.

Decisions are made by pure functions and plain structures: bucket.py (rates), fair_queue.py (whose turn it
is), room.py (what the workers can take), forecast.py (how long a place will take). gate.py holds them
together on the event loop; backend.py puts the gate in front of the workers.
"""
