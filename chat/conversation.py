"""A conversation with a chat model, whose keys and values are kept from turn to turn."""
import sys
import time

import torch

from model import sample_token
from tokenizer import TextStream


class Conversation:
    """
    model, tokenizer: a chat model and its tokenizer, which has a chat_template. cache: a `kvcache.base.BaseCache` of
    the model, with room for one sequence. how: the temperature, top_k, top_p and generator of `sample_token`.

    messages: what was said so far, dicts with role and content. n_kept, n_new: how many tokens of the last prompt were
    in the cache already, and how many were computed. ValueError if the model has no chat template.
    """

    def __init__(self, model, tokenizer, cache, **how):
        if tokenizer.chat_template is None:
            raise ValueError("this model has no chat, because its tokenizer has no chat template: leave out --chat, "
                             "and write the beginning of a text as --start")
        self.model, self.tokenizer, self.cache, self.how = model, tokenizer, cache, how
        self.token_bytes = tokenizer.bytes_of_tokens(model.config.vocab_size)
        self.handle, self.tokens, self.messages = cache.new(), [], []  # tokens: whose keys and values are in the cache
        self.n_kept = self.n_new = 0

    @torch.inference_mode()
    def answer(self, text, max_new_tokens):
        """
        Yield the pieces of the answer to what the user says. It ends with one of the tokenizer's end_tokens, after
        max_new_tokens, or where the context ends. A caller that stops earlier keeps the part that has come. ValueError,
        with the conversation as before, if it has grown beyond the context.
        """
        messages = [*self.messages, dict(role='user', content=text)]
        prompt, most = self.tokenizer.conversation(messages), self.model.config.max_positions
        if len(prompt) >= most:
            raise ValueError(f"the conversation has {len(prompt):,} tokens, and the model's context {most:,}: begin a "
                             "new one")
        self.keep_beginning_of(prompt)
        drawn, stream, said = [], TextStream(self.token_bytes), ''
        try:
            new = prompt[len(self.tokens):]
            while len(drawn) < max_new_tokens and len(prompt) + len(drawn) <= most:
                logits = self.feed(new)
                token = int(sample_token(logits, **self.how))
                if token in self.tokenizer.end_tokens:
                    break
                drawn.append(token)
                new = [token]
                said += (piece := stream.push(token))
                yield piece
            said += (piece := stream.finish())
            yield piece
        finally:
            self.tokens = (prompt + drawn)[:self.cache.length(self.handle)]  # after Ctrl-C, all but the last perhaps
            self.messages = [*messages, dict(role='assistant', content=said)]

    def keep_beginning_of(self, prompt):
        """Cut the sequence in the cache to the tokens with which the prompt begins, but not all of the prompt."""
        n = next((i for i, (a, b) in enumerate(zip(self.tokens, prompt[:-1])) if a != b),
                 min(len(self.tokens), len(prompt) - 1))
        try:
            self.cache.truncate(self.handle, n)
        except ValueError:  # the window has passed what comes before
            n = 0
            self.cache.truncate(self.handle, n)
        self.tokens, self.n_kept, self.n_new = self.tokens[:n], n, len(prompt) - n

    def feed(self, tokens):
        """The logits (1, vocab_size) behind these tokens, which follow those in the cache."""
        device = self.model.lm_head.weight.device
        start = self.cache.length(self.handle)
        return self.cache.step([self.handle], [start], torch.tensor([tokens], device=device)).float()


def talk(conversation, max_new_tokens):
    """
    Read what the user says line by line from standard input, and print the answers as they come. Ctrl-C ends an answer,
    Ctrl-D (the end of the input) the conversation.
    """
    while True:
        print('> ', end='', file=sys.stderr, flush=True)
        try:
            text = input()
        except EOFError:
            return print(file=sys.stderr)
        except KeyboardInterrupt:
            print(" (Ctrl-D ends the conversation)", file=sys.stderr)
            continue
        except UnicodeDecodeError as e:
            print(f"this line is not UTF-8 ({e.reason}): write it again", file=sys.stderr)
            continue
        began, n_drawn = time.perf_counter(), 0
        try:
            for piece in conversation.answer(text, max_new_tokens):
                n_drawn += 1
                print(piece, end='', flush=True)
        except KeyboardInterrupt:
            pass
        except ValueError as e:
            print(e, file=sys.stderr)
            continue
        print(flush=True)
        c, seconds = conversation, time.perf_counter() - began
        print(f"[of the conversation {c.n_kept:,} tokens were in the cache and {c.n_new:,} were computed; "
              f"{n_drawn:,} pieces in {seconds:.1f} s]", file=sys.stderr)
