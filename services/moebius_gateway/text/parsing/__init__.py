"""Reasoning and tool calls in the text of an answer: one streaming parser, one declarative file a family."""
