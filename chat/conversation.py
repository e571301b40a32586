"""A conversation with a chat model, whose keys and values are kept from turn to turn."""
import re
import sys
import time
from functools import partial
from importlib.util import find_spec

import torch

from model import sample_token
from tokenizer import TextStream

HELP = """/help           these lines
/clear          forget what was said
/system TEXT    tell the model TEXT before everything that is said; without TEXT: nothing
/exit           end the conversation, as Ctrl-D does
Lines that are pasted together are one message. Arrow keys edit it and bring back earlier ones. Ctrl-C ends an answer.
"""


class Conversation:
    """
    model, tokenizer: a chat model and its tokenizer, which has a chat_template. cache: a `kvcache.base.BaseCache` of
    the model, with room for one sequence, which grows. system: the system message, '' for none. variables: of the chat
    template, see `ChatTemplate.render`. repetition_penalty, min_p: as in requests to serve.py. how: the temperature,
    top_k, top_p and generator of `sample_token`.

    messages: what was said behind the system message, dicts with role and content. n_kept, n_new, n_drawn: how many
    tokens of the last prompt were in the cache already, how many were computed, and how many its answer has. cut: why
    the answer ended, if the model has not ended it. ValueError if the model has no chat template.
    """

    def __init__(self, model, tokenizer, cache, system='', variables=(), repetition_penalty=1.0, min_p=0.0, **how):
        if tokenizer.chat_template is None:
            raise ValueError("this model has no chat, because its tokenizer has no chat template: leave out --chat, "
                             "and write the beginning of a text as --start")
        self.model, self.tokenizer, self.cache, self.how = model, tokenizer, cache, how
        self.system, self.variables, self.repetition_penalty, self.min_p = system, variables, repetition_penalty, min_p
        self.token_bytes = tokenizer.bytes_of_tokens(model.config.vocab_size, skip_special=True)
        self.handle, self.tokens, self.messages = cache.new(), [], []  # tokens: whose keys and values are in the cache
        self.n_kept, self.n_new, self.n_drawn, self.cut = 0, 0, 0, ''

    @torch.inference_mode()
    def answer(self, text, max_new_tokens):
        """
        Yield the pieces of the answer to what the user says. It ends with one of the tokenizer's end_tokens, after
        max_new_tokens, or where the context ends. A caller that stops earlier keeps the part that has come. ValueError,
        with the conversation as before, if it has grown beyond the context.
        """
        messages = [*self.messages, dict(role='user', content=text)]
        system, most = [dict(role='system', content=self.system)] * bool(self.system), self.model.config.max_positions
        prompt = self.tokenizer.conversation([*system, *messages], **dict(self.variables))
        if len(prompt) >= most:
            raise ValueError(f"the conversation has {len(prompt):,} tokens, and the model's context {most:,}: begin a "
                             "new one (/clear), or say less")
        if (cache := self.cache.with_room(min(len(prompt) + max_new_tokens, most))) is not self.cache:
            self.cache, self.handle, self.tokens = cache, cache.new(), []
        self.keep_beginning_of(prompt)
        drawn, stream, said = [], TextStream(self.token_bytes, strip=self.tokenizer.strips), ''
        self.cut, self.n_drawn = '', 0
        try:
            new, room = prompt[len(self.tokens):], most - len(prompt) + 1
            while len(drawn) < min(max_new_tokens, room):
                token = int(sample_token(self.changed(self.feed(new), prompt + drawn), **self.how))
                if token in self.tokenizer.end_tokens:
                    break
                drawn.append(token)
                new, self.n_drawn = [token], len(drawn)
                said += (piece := stream.push(token))
                yield piece
            else:
                self.cut = (f"after max_new_tokens={max_new_tokens:,}: ask the model to go on" if max_new_tokens <= room
                            else f"at the end of the context of {most:,} tokens: /clear begins a new conversation")
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

    def changed(self, logits, tokens):
        """Logits (1, vocab_size), those behind these tokens, after repetition_penalty and min_p."""
        if self.repetition_penalty != 1:
            of_seen, penalty, logits = logits[:, tokens], self.repetition_penalty, logits.clone()
            logits[:, tokens] = torch.where(of_seen > 0, of_seen / penalty, of_seen * penalty)
        if self.min_p and self.how['temperature']:
            p = torch.softmax(logits / self.how['temperature'], -1)
            logits = logits.masked_fill(p < self.min_p * p.max(), -float('inf'))
        return logits


def edits_lines():
    """Let `input` edit lines, and take a paste as one. Returns what sets the terminal back, None if there is none."""
    if not (sys.stdin.isatty() and sys.stdout.isatty() and find_spec('readline')):
        return None
    import readline
    import termios
    readline.parse_and_bind('set enable-bracketed-paste on')
    return partial(termios.tcsetattr, 0, termios.TCSADRAIN, termios.tcgetattr(0))


def messages_of(user, edits):
    """What is said: the messages of the list `user`, then those read from standard input, a message a line."""
    for text in user:
        print(f"> {text}", file=sys.stderr)
        yield text
    while True:
        if not edits:
            print('> ', end='', file=sys.stderr, flush=True)
        try:
            text = input('> ' if edits else '')
        except EOFError:
            return print(file=sys.stderr)
        except KeyboardInterrupt:
            print(" (Ctrl-D ends the conversation)", file=sys.stderr)
        except UnicodeDecodeError as e:
            print(f"this line is not UTF-8 ({e.reason}): write it again", file=sys.stderr)
        else:
            yield text


def talk(conversation, max_new_tokens, first=()):
    """
    Read what the user says, see `messages_of`, and print the answers as they come. Ctrl-C ends an answer, Ctrl-D (the
    end of the input) the conversation; see HELP.
    """
    c, restore = conversation, edits_lines()
    if restore:
        import tty
        print("Write a message. /help shows the commands, Ctrl-C ends an answer, Ctrl-D the conversation.",
              file=sys.stderr)
    for text in messages_of(first, edits=restore):
        command, _, rest = text.partition(' ')
        if command == '/exit':
            return
        if command == '/clear':
            c.messages = []
        elif command == '/system':
            c.system = rest.strip()
        elif command == '/help':
            print(HELP, end='', file=sys.stderr)
        elif re.fullmatch('/[a-z]+', command):
            print(f"there is no command {command}: /help names those that there are", file=sys.stderr)
        elif text.strip():
            began = time.perf_counter()
            try:
                if restore:  # what is typed now waits unseen; a terminal that collects lines cuts them at 4,095 letters
                    tty.setcbreak(0, tty.TCSADRAIN)
                    print('\033[?2004h', end='', flush=True)  # a paste is still marked as one
                for piece in c.answer(text, max_new_tokens):
                    print(piece, end='', flush=True)
            except KeyboardInterrupt:
                pass
            except ValueError as e:
                print(e, file=sys.stderr)
                continue
            finally:
                if restore:
                    restore()
            print(flush=True)
            if c.cut:
                print(f"[the answer was cut {c.cut}]", file=sys.stderr)
            print(f"[of the conversation {c.n_kept:,} tokens were in the cache and {c.n_new:,} were computed; "
                  f"{c.n_drawn:,} new tokens in {time.perf_counter() - began:.1f} s]", file=sys.stderr)
