"""
Conversations with chat models.

    template       a tokenizer's chat template: messages in, the text of a prompt out
    conversation   a conversation in the terminal, whose keys and values are kept
"""
