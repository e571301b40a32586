"""A conversation with a chat model, whose keys and values are remembered from turn to turn."""
import re
import signal
import sys
import time
from importlib.util import find_spec

from chat.thoughts import behind_thoughts
from tokenizer import TextStream

HELP = """/help           these lines
/clear          forget what was said
/system TEXT    tell the model TEXT before everything that is said; without TEXT: nothing
/exit           end the conversation, as /quit, /bye and Ctrl-D do
Lines that are pasted together are one message, and Ctrl-V Ctrl-J begins a line. Arrow keys edit it and bring back
earlier ones. Ctrl-C ends an answer.
"""


class Conversation:
    """
    engine: an `engine.Engine` of a chat model; its pool remembers what was said. tokenizer: has a chat_template.
    system: the system message, '' for none. variables: of the chat template, see `ChatTemplate.render`. seed, how: of
    the draws, see `decode.draw.DrawSettings`. ValueError if the model has no chat template.
    """

    def __init__(self, engine, tokenizer, system='', variables=(), seed=0, **how):
        if tokenizer.chat_template is None:
            raise ValueError("this model has no chat, because its tokenizer has no chat template: leave out --chat, "
                             "and write the beginning of a text as --start")
        self.engine, self.tokenizer, self.seed, self.how = engine, tokenizer, seed, how
        self.system, self.variables = system, variables
        self.token_bytes = tokenizer.bytes_of_tokens(engine.model.config.vocab_size, skip_special=True)
        self.messages = []  # what was said after the system message, dicts with role and content
        self.n_answers = 0  # number i draws with seed + i, because answers with the same noise resemble each other
        self.n_kept = self.n_new = 0  # tokens of the last prompt that were in the cache already, and that were computed
        self.n_drawn, self.cut = 0, ''  # tokens of its answer, and why that ended, if the model has not ended it

    def stop(self, *signal_and_frame):
        """End the answer after the present call of the executor; also a handler of signals."""
        self.engine.return_soon[0] = 1

    def answer(self, text, max_new_tokens):
        """
        Yield the pieces of the answer to what the user says. It ends with one of the tokenizer's end_tokens, after
        max_new_tokens, or where the context ends. A caller that stops earlier keeps the part that has come. ValueError,
        with the conversation as before, if it has grown beyond the context.
        """
        self.engine.return_soon[0] = 0
        messages, most = [*self.messages, dict(role='user', content=text)], self.engine.model.config.max_positions
        system = [dict(role='system', content=self.system)] * bool(self.system)
        prompt = self.tokenizer.conversation([*system, *messages], **dict(self.variables))
        if len(prompt) >= most:
            raise ValueError(f"the conversation has {len(prompt):,} tokens, and the model's context {most:,}: begin a "
                             "new one (/clear), or say less")
        room, stop_ids = most - len(prompt) + 1, self.tokenizer.end_tokens
        constraint = behind_thoughts(self.how.get('constraint'), prompt, self.tokenizer.token_bytes)
        sequence, = self.engine.add(prompt, min(max_new_tokens, room), seed=self.seed + self.n_answers,
                                    stop_ids=stop_ids, **self.how | dict(constraint=constraint))
        self.n_answers += 1
        stream, said, self.cut = TextStream(self.token_bytes, strip=self.tokenizer.strips), '', ''
        try:
            while not sequence.ended and not self.engine.return_soon[0]:
                for _, output in self.engine.step():
                    new = output.tokens[:-1] if sequence.ended == 'stop' else output.tokens
                    said += (piece := stream.push(*new))
                    yield piece
                if sequence.error:
                    raise sequence.error
            if sequence.ended == 'length':
                self.cut = (f"after max_new_tokens={max_new_tokens:,}: ask the model to go on" if max_new_tokens <= room
                            else f"at the end of the context of {most:,} tokens: /clear begins a new conversation")
            said += (piece := stream.finish())
            yield piece
        finally:
            self.engine.end(sequence, 'abort')
            self.n_kept = sequence.n_found or 0
            self.n_new, self.n_drawn = len(prompt) - self.n_kept, sequence.n_drawn - (
                sequence.ended == 'stop' and sequence.tokens[-1] in stop_ids)
            self.messages = [*messages, dict(role='assistant', content=said)]


def edits_lines():
    """In a terminal, let `input` edit lines and read a paste as one. Returns whether it does."""
    if not (sys.stdin.isatty() and sys.stdout.isatty() and find_spec('readline')):
        return False
    import readline
    readline.parse_and_bind('set enable-bracketed-paste on')
    return True


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
    """Read what the user says, see `messages_of` and HELP, and print the answers as they come."""
    c, edits = conversation, edits_lines()
    if edits:
        print("Write a message. /help shows the commands, Ctrl-C ends an answer, Ctrl-D the chat.", file=sys.stderr)
    for text in messages_of(first, edits):
        command, _, rest = text.partition(' ')
        if command in ('/exit', '/quit', '/bye'):
            return
        if command == '/clear':
            c.messages = []
            print("[what was said is forgotten]", file=sys.stderr)
        elif command == '/system':
            c.system = rest.strip()
            print(f"[the system message is now: {c.system}]" if c.system else "[no system message]", file=sys.stderr)
        elif command == '/help':
            print(HELP, end='', file=sys.stderr)
        elif re.fullmatch('/[a-z]+', command):
            print(f"there is no command {command}: /help names those that there are", file=sys.stderr)
        elif text.strip():
            began, before = time.perf_counter(), signal.signal(signal.SIGINT, c.stop)  # no step is broken off
            try:
                for piece in c.answer(text, max_new_tokens):
                    print(piece, end='', flush=True)
            except ValueError as e:
                print(e, file=sys.stderr)
                continue
            finally:
                signal.signal(signal.SIGINT, before)
            print(flush=True)
            if c.cut:
                print(f"[the answer was cut {c.cut}]", file=sys.stderr)
            print(f"[of the conversation {c.n_kept:,} tokens were in the cache and {c.n_new:,} were computed; "
                  f"{c.n_drawn:,} new tokens in {time.perf_counter() - began:.1f} s]", file=sys.stderr)
