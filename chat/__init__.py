"""
Conversations with chat models.

    template       a tokenizer's chat template: messages in, the text of a prompt out
    tools          functions that a client has, and the calls that a model writes
    conversation   a conversation in the terminal, whose keys and values are kept
"""
