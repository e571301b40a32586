"""
Chat templates: the Jinja program in the files of a tokenizer that writes a conversation as the text of a prompt.

    template = ChatTemplate(source, dict(bos_token='<s>', eos_token='</s>'))
    template.render([dict(role='user', content='Hello')])        '<s>[INST] Hello [/INST]'

A template is a program that a stranger has written. It runs in Jinja's sandbox, and in a process of its own, which
starts when it is first needed, and ends when a rendering takes more than SECONDS or MEMORY. What templates find beside
their messages is what transformers gives them: https://huggingface.co/docs/transformers/chat_templating_writing.
"""
import json
import os
import signal
import subprocess
import sys
import threading
from functools import lru_cache, partial

SECONDS = 2.0           # of the processor for a rendering, at most; Windows has no such limit
CLOCK = 60              # seconds of a rendering on a busy machine, at most, with the start of the process
MEMORY = 2**29          # bytes of the process, at most
MOST_TEXT = 2**24       # characters of a rendered conversation, at most
MARK = 'END_OF_THE_FINAL_MESSAGE '  # behind the content of a message that is continued


class ChatTemplate:
    """
    source: the template. special_tokens: {'bos_token': text, ...}, by whose names a template can use them. Several
    threads may use a template.
    """

    def __init__(self, source, special_tokens=None):
        self.source, self.special_tokens = source, special_tokens or {}
        self.pid = self.process = self.lock = None

    def render(self, messages, /, continue_final_message=False, **variables):
        """
        The text of a conversation, up to where the next answer of the assistant begins. messages: a list of dicts with
        role and content. variables: what the template finds beside them, such as add_generation_prompt (by default
        True). continue_final_message: the text ends with the last message's content. ValueError, with what Jinja or the
        template says, if the template cannot be read, or does not take this.
        """
        if not continue_final_message:
            return self.ask(variables | dict(messages=messages))
        *others, last = messages or [{}]
        if not isinstance(last.get('content'), str):
            raise ValueError("continue_final_message needs a last message whose content is a text")
        marked = self.ask(variables | dict(messages=[*others, last | dict(content=last['content'] + MARK)],
                                           add_generation_prompt=False))
        text, mark, _ = marked.rpartition(MARK.strip())
        if not mark:
            raise ValueError("the chat template leaves out the last message, so that it cannot be continued")
        return text if marked[len(text):].startswith(MARK) else text.rstrip()  # some take blanks from both ends

    def ask(self, variables):
        """Have the process render the template."""
        if self.pid != os.getpid():  # after a fork the process answers the parent
            self.pid, self.process, self.lock = os.getpid(), None, threading.Lock()
        variables = dict(tools=None, documents=None, add_generation_prompt=True) | self.special_tokens | variables
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                # -I ignores PYTHONPATH, whose modules could replace those of the standard library. The folders of
                # sys.path come behind it: jinja2 may be in any of them
                self.process = subprocess.Popen([sys.executable, '-I', __file__, *sys.path], text=True,
                                                encoding='utf-8', stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                                start_new_session=True)
            kind, text = json.loads(self.answer(json.dumps([self.source, variables])))
        if kind == 'error':
            raise ValueError(f"the chat template {text}")
        return text

    def answer(self, question):
        """The line with which the process answers a line, see `serve`. ValueError if it ends instead."""
        timer = threading.Timer(CLOCK, self.process.kill)
        timer.start()
        try:
            print(question, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ''
        except BaseException:  # an answer that nobody has read must not be taken for the next one
            self.close()
            raise
        finally:
            timer.cancel()
        if line.endswith('\n'):
            return line
        ended = -self.process.wait()
        self.close()
        if ended == getattr(signal, 'SIGPROF', None):
            raise ValueError(f"the chat template took longer than {SECONDS:.0f} s: shorten the conversation, or use "
                             "another template")
        how = signal.Signals(ended).name if ended > 0 else f"exit code {-ended}"
        raise ValueError(f"the process of the chat template was ended ({how}), perhaps because {MEMORY >> 20} MB, the "
                         f"memory of the machine or {CLOCK} s did not suffice: try again, or shorten the conversation")

    def close(self):
        """End the process. A later rendering starts another one."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def __del__(self):
        if getattr(self, 'process', None) is not None and self.pid == os.getpid():
            self.process.kill()


# from here on: the process that renders

@lru_cache(maxsize=1)
def compiled(source):
    """The template of a source, in an environment as transformers makes it."""
    from datetime import datetime

    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what the assistant has written, for training. Here it has no effect."""
        tags = {'generation'}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(['name:endgeneration'], drop_needle=True)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, loopcontrols])
    environment.filters['tojson'] = tojson
    environment.globals['raise_exception'] = raise_exception
    environment.globals['strftime_now'] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source)


def serve():
    """
    Answer each line of standard input, JSON of a template and its variables, by a line: ['text', what was rendered] or
    ['error', why not].
    """
    sys.path += sys.argv[1:]
    try:
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass  # Windows has no limit of memory, and macOS not this one
    limit = partial(signal.setitimer, signal.ITIMER_PROF) if hasattr(signal, 'setitimer') else lambda seconds: None
    for line in sys.stdin:
        (source, variables), refused = json.loads(line), "cannot be read"
        try:
            import jinja2  # noqa: F401 (it takes long, and none of the template's time)
            limit(SECONDS)  # then SIGPROF ends this process
            template, refused = compiled(source), "does not take this conversation"
            text = template.render(variables)
            if len(text) > MOST_TEXT:
                raise ValueError(f"its text has {len(text):,} characters, and {MOST_TEXT:,} are allowed")
            answer = 'text', text
        except Exception as e:  # a template can raise anything
            answer = 'error', f"{refused}: {type(e).__name__}: {e}"[:300]
        limit(0)
        print(json.dumps(answer), flush=True)


if __name__ == '__main__':
    serve()
