"""The driver for processes of this machine.

Every process dies with the one that started it (`child.py`), so a controller that is restarted finds none of
its predecessor's workers alive: it adopts nothing, and starts them anew by the history that it left.
"""
