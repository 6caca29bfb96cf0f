"""What answers must spell: grammars compiled beside the loop, and the tokens that each allows next.

No torch: masks are rows of bits, which `token_masks.py` applies to logits.
"""
