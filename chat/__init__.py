"""
Conversations with chat models.

    template       a tokenizer's chat template: messages in, the text of a prompt out
    answers        which tokens of a conversation are the assistant's, for training
    thoughts       what a model thinks before it answers
    tools          functions that a client has, and the calls that a model writes
    conversation   a conversation in the terminal, whose keys and values are kept
"""
