"""The page in a browser, headless Chromium, with a real engine on a small model that steps when a test lets it."""
import os
import shutil
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from conftest import SERVING, needs
from example_models import TEXT, json_tokenizer

needs(*SERVING, 'selenium')

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from serving_process import serving
from small_engine import drawing_engine, served_by

from tokenizer import JSONTokenizer

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
DRIVER = shutil.which('chromedriver')
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no browser: chromium, chromium-driver")

PROMPT = 'once upon a time there was a king'
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope='module')
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ('--headless=new', '--disable-gpu', '--disable-background-networking', '--disable-dev-shm-usage'):
        options.add_argument(argument)
    if hasattr(os, 'geteuid') and os.geteuid() == 0:
        options.add_argument('--no-sandbox')
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser):
    """A server with the page open. page.client: of the server. page.engine: its engine."""
    yield from opened(browser, drawing_engine())


@pytest.fixture
def chat(browser, request):
    """
    The page of a model whose tokenizer, chat.tokenizer, has a chat template. A test's parameter: of so many tokens that
    a step reads at most.
    """
    tokenizer = JSONTokenizer(json_tokenizer(TEXT).json, chat_template=TEMPLATE)
    engine = drawing_engine(tokenizer, budget=getattr(request, 'param', 64))
    for page in opened(browser, engine, served_by(engine, tokenizer=tokenizer)):
        page.tokenizer = tokenizer
        page.fill(max_tokens=20)
        yield page


def opened(browser, engine, served=None):
    with serving(engine, served) as client:
        page = Page(browser, client, engine)
        page.open()
        browser.execute_script('sessionStorage.clear()')
        page.open()
        yield page
        engine.allow(float('inf'))
        browser.get('about:blank')
        assert [entry for entry in browser.get_log('browser') if entry['source'] != 'network'] == []


class Page:
    def __init__(self, browser, client, engine):
        self.browser, self.client, self.engine = browser, client, engine

    def open(self):
        self.browser.get(str(self.client.base_url))
        self.wait(lambda: self.text('#status') == 'connected')

    def wait(self, condition):
        return WebDriverWait(self.browser, 30, .03).until(lambda _: condition())

    def __getitem__(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self[selector].get_property('textContent')

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def fill(self, **values):
        for name, value in values.items():
            field = self['#' + name]
            field.clear()
            field.send_keys(str(value))

    def paste(self, name, text):
        """Replace the text of a field, at once."""
        self.browser.execute_script('arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event("input"))',
                                    self['#' + name], text)

    def focused(self):
        """The id of the element that has the keyboard."""
        return self.browser.switch_to.active_element.get_attribute('id')

    def visible(self, selector):
        """Is all of this element in the window, and nothing before it?"""
        return self[selector].is_displayed() and self.browser.execute_script("""
            const element = document.querySelector(arguments[0])
            const {top, bottom, left, right} = element.getBoundingClientRect(), middle = (left + right) / 2
            return [top + 1, bottom - 1].every(y => element.contains(document.elementFromPoint(middle, y)))
            """, selector)

    def finished(self):
        return self['#go'].is_enabled()

    def samples(self):
        return [pre.get_property('textContent') for pre in self.all('.sample pre')]

    def answers(self, **fields):
        """What the API answers, each behind the prompt, as the page shows it."""
        body = {'prompt': PROMPT, 'temperature': .8, 'top_p': 1, 'echo': True, **fields}
        return [choice['text'] for choice in self.client.post('/v1/completions', json=body).json()['choices']]

    def say(self, text):
        """Write a message, and send it with Enter."""
        self['#message'].send_keys(Keys.CONTROL, 'a')
        self['#message'].send_keys(text, Keys.ENTER)

    def press(self, name):
        """Press the button with this name for a screen reader."""
        self[f'[aria-label="{name}"]'].click()

    def turns(self):
        """The conversation that is shown, as messages of the API."""
        return [dict(role=role, content=pre.get_property('textContent')) for turn in self.all('.turn')
                for role, pre in zip(('user', 'assistant'), turn.find_elements(By.CSS_SELECTOR, 'pre'), strict=True)]

    def answer(self, messages, **fields):
        """What the API answers, a message of the assistant."""
        body = {'messages': messages, 'temperature': .8, 'max_completion_tokens': 20, 'seed': 1337, **fields}
        message = self.client.post('/v1/chat/completions', json=body).json()['choices'][0]['message']
        return {name: message[name] for name in ('role', 'content')}

    def is_answered(self, messages, **fields):
        """Once the page has its answer, is that the API's answer to these messages, and is no more shown?"""
        self.wait(self.finished)
        return self.turns() == [*messages, self.answer(messages, **fields)]

    def squares(self):
        return self.browser.execute_script("return [...document.querySelectorAll('#pool > i')].map("
                                           "i => i.className.split(' ')[0])")


def kinds(state):
    """What the squares must be."""
    return ['shared' if len(block['samples']) > 1 else 'used' if block['samples'] else
            'remembered' if block['remembered'] else 'free' for block in state['blocks']]


def test_types_and_reads_the_stream(page):
    """
    Samples stream side by side, and have the texts that the API gives for the same seed. A model without a template has
    no chat.
    """
    assert page.client.get('/v1/models').json()['data'][0]['chat'] is False
    assert page['#prompt'].is_displayed() and page['#n'].is_displayed() and page['#go'].text == 'Continue'
    assert not any(element.is_displayed() for element in page.all('[data-mode=chat], #modes, #modes *'))
    page.fill(prompt=PROMPT, seed=5, n=3, max_tokens=40)
    page.engine.allow(20)
    page['#go'].click()
    page.wait(lambda: len(page.samples()) == 3 and all(len(text) > len(PROMPT) for text in page.samples()))
    assert all(len(text) < len(PROMPT) + 40 for text in page.samples()) and not page.finished()
    page.engine.allow(float('inf'))
    page.wait(page.finished)
    assert page.samples() == page.answers(seed=5, n=3, max_tokens=40)
    assert [note.text for note in page.all('.sample footer span:first-child')] == [
        '40 tokens, cut off'] * 3
    first, rate = (float(figure.text.split()[0].replace(',', '')) for figure in page.all('#speed .figure b'))
    assert first > 0 and rate > 0 and len({e.location['y'] for e in page.all('.sample')}) < 3


def test_works_with_the_keyboard(page):
    page.engine.allow(12)
    page['#prompt'].clear()
    page['#prompt'].send_keys(PROMPT, Keys.CONTROL, Keys.ENTER)
    page.wait(lambda: page.samples() and len(page.samples()[0]) > len(PROMPT))
    page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.wait(lambda: page.finished() and not page.engine.live)
    assert page.text('.sample footer span').endswith(', stopped') and not page.text('#error')
    order = []
    for _ in range(12):
        page.browser.switch_to.active_element.send_keys(Keys.TAB)
        order.append(page.browser.switch_to.active_element.get_attribute('id'))
    assert [name for name in order if name][:7] == ['temperature', 'top_p', 'seed', 'n', 'max_tokens', 'go', 'pool']
    page['#pool'].send_keys(Keys.HOME)
    assert page.text('#inspector').startswith('Block 0, remembered') and PROMPT[:4] in page.text('#inspector pre')
    page['#pool'].send_keys(Keys.ARROW_RIGHT)
    assert page.text('#inspector').startswith('Block 1') and PROMPT[4:8] in page.text('#inspector pre')
    page['#pool'].send_keys(Keys.END, Keys.ARROW_DOWN)
    assert page.text('#inspector').startswith('Block 95, free')


def test_squares_agree_with_the_cache(page):
    """
    While three samples with one prompt wait for their next step; a block and a request say what they have. Blocks of a
    request that was served between two looks at the pool are remembered in grey, not as if free.
    """
    page.answers(prompt='another one', max_tokens=1)
    page.wait(lambda: page.squares().count('remembered') == len('another one') // 4)
    assert len({page['#pool > i.' + kind].value_of_css_property('background-color')
                for kind in ('remembered', 'free')}) == 2
    page.fill(prompt=PROMPT, n=3, max_tokens=50)
    page.engine.allow(26)  # the first one computes the prompt
    page['#go'].click()
    page.wait(lambda: page.client.get('/cache').json()['counters']['generated_tokens'] == 1 + 3 * 25)
    page.wait(lambda: page.squares() == kinds(page.client.get('/cache').json()))
    state = page.client.get('/cache').json()
    assert kinds(state).count('shared') == len(PROMPT) // 4 and len(state['running']) == 3
    assert [int(page.text('#n-' + kind)) for kind in ('used', 'shared', 'free')] == [
        kinds(state).count(kind) for kind in ('used', 'shared', 'free')]
    colours = [square.get_dom_attribute('style') or '' for square in page.all('#pool > i')]
    assert all(('gradient' in colour) == (kind == 'shared') for colour, kind in zip(colours, kinds(state)))
    assert len({c for c, kind in zip(colours, kinds(state)) if kind == 'used'}) == 3

    block = kinds(state).index('shared')
    ActionChains(page.browser).move_to_element(page.all('#pool > i')[block]).perform()
    page.wait(lambda: page.text('#inspector').startswith(f'Block {block}, shared by 3'))
    assert page.text('#inspector pre') == state['blocks'][block]['text']
    assert len(page.all('#running li.of-block')) == 3

    ActionChains(page.browser).move_to_element(page.all('#running li')[1]).perform()
    page.wait(lambda: page.all('#inspector .table span'))
    assert [int(chip.text) for chip in page.all('#inspector .table span')] == state['running'][1]['blocks']
    picked = [int(square.get_attribute('data-block')) for square in page.all('#pool > i.picked')]
    assert picked == sorted(state['running'][1]['blocks']) and 'this page' in page.text('#running')


def test_a_reload_in_mid_stream(page):
    """The request of the page that is gone ends; the new page has the settings, and works."""
    page.fill(prompt=PROMPT, seed=9, n=1, max_tokens=120)
    page.engine.allow(15)
    page['#go'].click()
    page.wait(lambda: page.samples() and len(page.samples()[0]) > len(PROMPT))
    page.open()
    page.wait(lambda: not page.engine.live)
    page.engine.allow(float('inf'))
    assert page['#prompt'].get_property('value') == PROMPT and page['#seed'].get_property('value') == '9'
    page['#go'].click()
    page.wait(lambda: page.samples() and page.finished())
    assert page.samples() == page.answers(seed=9, max_tokens=120)


@pytest.mark.parametrize('width, scheme', [(390, 'dark'), (1280, 'light')])
def test_narrow_and_dark(chat, width, scheme):
    """Nothing is wider than the window, and text stands out from its background (WCAG: a contrast of 4.5)."""
    with shown(chat, width, scheme):
        chat.say('a word of more than its line: ' + 'x' * 80)
        chat.wait(chat.finished)
        check_look(chat, scheme, '#modes label', '#modes label:last-child', '.asked pre', '.asked button',
                   '.sample pre', '.sample footer', '.found', 'label[for=message]', '#clear')
        chat['#modes label:last-child'].click()
        chat.fill(prompt=PROMPT, n=2, max_tokens=30)
        chat['#go'].click()
        chat.wait(lambda: len(chat.all('#samples .sample')) == 2 and chat.finished())
        check_look(chat, scheme, 'label[for=prompt]', '#samples .sample pre', '#samples .given',
                   '#samples .sample footer', '#inspector', '#go')


@contextmanager
def shown(page, width, scheme='light', height=800):
    """In a window of this width, in light or dark colours."""
    try:
        page.browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', {
            'width': width, 'height': height, 'deviceScaleFactor': 1, 'mobile': width < 500})
        page.browser.execute_cdp_cmd('Emulation.setEmulatedMedia', {
            'features': [{'name': 'prefers-color-scheme', 'value': scheme}]})
        yield
    finally:
        page.browser.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})
        page.browser.execute_cdp_cmd('Emulation.setEmulatedMedia', {'features': []})


def check_look(page, scheme, *selectors):
    assert page.browser.execute_script('return document.documentElement.scrollWidth <= innerWidth')
    for selector in selectors:
        ink, paper = page.browser.execute_script("""
            let element = document.querySelector(arguments[0]), ink = getComputedStyle(element).color
            while (getComputedStyle(element).backgroundColor === 'rgba(0, 0, 0, 0)') element = element.parentElement
            return [ink, getComputedStyle(element).backgroundColor]""", selector)
        bright, dim = sorted((luminance(ink), luminance(paper)), reverse=True)
        assert page[selector].is_displayed() and (bright + .05) / (dim + .05) >= 4.5, (selector, ink, paper)
    assert (luminance(page['body'].value_of_css_property('background-color')) < .1) == (scheme == 'dark')


def luminance(colour):
    """The relative luminance of 'rgb(r, g, b)', as WCAG defines it."""
    channels = [int(part) / 255 for part in colour.split('(')[1].rstrip(')').split(',')[:3]]
    linear = [c / 12.92 if c <= .04045 else ((c + .055) / 1.055) ** 2.4 for c in channels]
    return .2126 * linear[0] + .7152 * linear[1] + .0722 * linear[2]


def test_an_error_is_shown(page):
    """A refused prompt leaves no empty boxes, and the samples that there are."""
    whole = []
    for _ in range(2):
        page.fill(prompt='Q')
        page['#go'].click()
        page.wait(lambda: 'never saw' in page.text('#error') and page.finished())
        assert page.samples() == whole
        page.fill(prompt=PROMPT, max_tokens=5)
        page['#go'].click()
        page.wait(lambda: page.samples() and page.finished() and not page.text('#error'))
        whole = page.samples()
    assert whole == page.answers(seed=1337, n=2, max_tokens=5)


def test_a_server_with_a_key_asks_for_it(browser):
    engine = drawing_engine()
    with serving(engine, api_key='secret') as client:
        page = Page(browser, client, engine)
        browser.get(str(client.base_url))
        page.wait(lambda: page['#key'].is_displayed() and 'needs its API key' in page.text('#status'))
        page.fill(key='secret')
        page.wait(lambda: page.text('#status') == 'connected')
        page.fill(prompt=PROMPT, max_tokens=5)
        page['#go'].click()
        page.wait(lambda: page.samples() and page.finished() and not page.text('#error'))
        assert all(len(text) == len(PROMPT) + 5 for text in page.samples())
        browser.get('about:blank')


def test_the_second_turn_finds_the_blocks_of_the_first(chat):
    """Turns stream, have the texts that the API gives for the same messages, and say what they found."""
    said = [dict(role='user', content='what is <b>a king</b>?')]
    chat.engine.allow(8)
    chat.say(said[0]['content'])
    chat.wait(lambda: chat.turns() and chat.turns()[1]['content'])
    blocks = chat.wait(lambda: [each['blocks'] for each in chat.client.get('/cache').json()['running']])[0]
    assert not chat.finished() and chat['#turns'].get_attribute('aria-busy') == 'true'
    chat.engine.allow(float('inf'))
    assert chat.is_answered(said) and not chat.all('.turn b')
    first = len(chat.tokenizer.conversation(chat.turns()[:1]))
    assert chat.text('.found') == f'0 of {first} prompt tokens found'

    said = [*chat.turns(), dict(role='user', content='and a queen?')]
    chat.engine.allow(8)
    chat.say('and a queen?')
    chat.wait(lambda: len(chat.turns()) == 4 and chat.turns()[3]['content'])
    chat.wait(lambda: {chat.squares()[i] for i in blocks[:first // 4]} == {'used'})  # by the second turn
    chat.engine.allow(float('inf'))
    assert chat.is_answered(said)
    found, of = (int(chat.all('.found')[1].text.split()[i]) for i in (0, 2))
    assert of == len(chat.tokenizer.conversation(said)) and first // 4 * 4 <= found < of
    assert [note.text for note in chat.all('.turn footer span:first-child')] == [
        '20 tokens, cut off'] * 2


def test_a_turn_is_stopped_edited_and_repeated(chat):
    chat.engine.allow(5)
    chat.say('one')
    chat.wait(lambda: chat.turns() and chat.turns()[1]['content'])
    chat['#stop'].click()
    chat.wait(lambda: chat.finished() and not chat.engine.live)
    assert chat.text('.turn footer span').endswith(', stopped') and not chat.text('#error')
    assert chat.focused() == 'message'
    chat.wait(lambda: chat.squares() == kinds(chat.client.get('/cache').json()))
    assert not {'used', 'shared'} & set(chat.squares())  # its blocks are free
    chat.engine.allow(float('inf'))
    said = [*chat.turns(), dict(role='user', content='two')]
    chat.say('two')
    assert chat.is_answered(said)  # the part of an answer that has come is sent

    whole = chat.turns()
    chat.press('Edit turn 1')
    assert chat['#message'].get_property('value') == 'one' and len(chat.all('.turn.replaced')) == 2
    chat['#message'].send_keys(Keys.ESCAPE)
    assert chat['#message'].get_property('value') == '' and not chat.all('.turn.replaced') and chat.turns() == whole
    for name in ('Cancel', 'Edit', 'Cancel'):
        chat.all('.asked button')[1].click()
        assert chat.all('.asked button')[1].accessible_name == f'{name} turn 2'
        assert len(chat.all('.turn.replaced')) == (name == 'Cancel')
    chat.say('another')
    said[2]['content'] = 'another'
    assert chat.is_answered(said)

    chat['#message'].send_keys('a draft')
    for seed in (1338, 1339):
        chat.press('Repeat turn 2')
        assert chat.is_answered(said, seed=seed) and chat['#message'].get_property('value') == 'a draft'
    chat.fill(system='be brief', message='')
    chat.press('Repeat turn 1')
    chat.wait(chat.finished)
    assert chat.turns() == [said[0], chat.answer([dict(role='system', content='be brief'), said[0]], seed=1338)]
    chat['#clear'].click()
    assert not chat.turns()


def test_a_message_that_is_refused_comes_back_and_blanks_are_none(chat):
    for text in ('   ', ' \n\t '):
        chat.paste('message', text)
        chat['#message'].send_keys(Keys.ENTER)
        assert not chat.turns() and chat.finished() and not chat.engine.live
    chat.say('one')
    chat.wait(chat.finished)
    whole = chat.turns()
    chat.fill(max_tokens=255)
    chat.say('two')
    chat.wait(lambda: 'tokens' in chat.text('#error') and chat.finished())
    assert chat.turns() == whole and chat['#message'].get_property('value') == 'two'
    chat.fill(max_tokens=20)
    chat['#go'].click()
    assert chat.is_answered([*whole, dict(role='user', content='two')]) and not chat.text('#error')


def test_a_chat_with_the_keyboard_and_a_reload(chat):
    chat['#message'].send_keys('a', Keys.SHIFT, Keys.ENTER, Keys.NULL, 'b', Keys.ENTER)
    assert chat.is_answered([dict(role='user', content='a\nb')])
    chat.engine.allow(5)
    chat.say('two')
    chat.wait(lambda: len(chat.turns()) == 4 and chat.all('.turn footer')[1].text.startswith('5 tokens'))
    before, found = chat.turns(), chat.text('.found')
    chat.open()
    chat.wait(lambda: chat['#turns'].is_displayed())
    assert chat.turns() == before and chat.all('.turn footer')[1].text.startswith('5 tokens, not finished')
    assert chat.text('.found') == found != ''
    chat.engine.allow(float('inf'))

    chat['#modes label'].click()
    names = []
    for _ in range(15):
        ActionChains(chat.browser).send_keys(Keys.TAB).perform()
        active = chat.browser.switch_to.active_element
        names.append(active.get_attribute('id') or active.accessible_name)
    assert names == ['turns', 'Edit turn 1', 'Repeat turn 1', 'Edit turn 2', 'Go on with answer 2',
                     'Repeat turn 2', 'message', 'go', 'clear', 'temperature', 'top_p', 'seed', 'max_tokens', 'system',
                     'pool']

    chat['#modes label'].click()
    ActionChains(chat.browser).send_keys(Keys.ARROW_RIGHT).perform()
    assert chat['#prompt'].is_displayed() and not chat['#turns'].is_displayed()
    chat['#prompt'].send_keys(Keys.CONTROL, Keys.ENTER)
    chat.wait(lambda: len(chat.samples()) == 2 + len(chat.all('.turn')) and chat.finished())
    chat.open()
    chat.wait(lambda: chat['#modes'].is_displayed())
    assert chat['#prompt'].is_displayed() and chat.turns() == before


@pytest.mark.parametrize('width, height', [(1280, 900), (390, 844)])
def test_an_error_stands_where_one_looks(chat, width, height):
    """Also behind a paste that is too long, which fills its field; it goes with New chat, and with the mode."""
    with shown(chat, width, height=height):
        for text in ('one', 'two', 'three'):
            chat.say(text)
            chat.wait(chat.finished)
        assert chat.visible('.turn:last-child .more')
        for act, left in (('#modes label:last-child', 6), ('#modes label', 6), ('#clear', 0), ('#clear', 0)):
            chat.paste('message', 'a word\n' * 500)
            chat.paste('prompt', 'a word\n' * 500)
            chat['#go'].click()
            chat.wait(lambda: chat.text('#error') and chat.finished())
            assert 'largest prompt' in chat.text('#error') and chat.visible('#error') and chat.visible('#go')
            assert chat.text('#error')[0].isupper()
            check_look(chat, 'light', '#error')
            chat[act].click()
            assert not chat.text('#error') and not chat['#error'].is_displayed() and len(chat.turns()) == left


@pytest.mark.parametrize('chat', [32], indirect=True)
def test_an_answer_says_how_much_of_its_prompt_is_read(chat, monkeypatch):
    """Also while the stream has comments. If it is stopped there, the message comes back."""
    monkeypatch.setattr('serving.answer.SILENCE', .1)
    chat.engine.allow(0)
    message = 'a rather long message, ' * 6
    chat.say(message)
    n = len(chat.tokenizer.conversation([dict(role='user', content=message)]))
    chat.wait(lambda: chat.engine.live)
    assert chat.text('.turn footer span') == 'waiting' and n > 3 * 32
    for k in range(1, n // 32):
        chat.engine.step()
        chat.wait(lambda: chat.text('.turn footer span') == f'reading {32 * k} of {n} tokens')
        assert chat.client.get('/cache').json()['running'][0]['computed'] == 32 * k
        assert chat.text('#running li span').startswith('this page') and not chat.turns()[1]['content']
    chat['#stop'].click()
    chat.wait(chat.finished)
    assert not chat.turns() and chat['#message'].get_property('value') == message and not chat.text('#error')
    chat.engine.allow(float('inf'))
    chat['#go'].click()
    assert chat.is_answered([dict(role='user', content=message)])
    assert chat.text('.turn footer span') == '20 tokens, cut off'


def test_an_answer_that_was_cut_goes_on(chat):
    """It becomes the beginning of what the API says behind it; one that cannot go on stays as it is."""
    goes_on = dict(continue_final_message=True, add_generation_prompt=False)
    chat.say('one')
    assert chat.is_answered([dict(role='user', content='one')])
    for n in (20, 40):
        asked, part = chat.turns()
        more = chat.answer([asked, part], seed=1337 + n, **goes_on)['content']
        chat.press('Go on with answer 1')
        chat.wait(chat.finished)
        assert chat.turns() == [asked, {**part, 'content': part['content'] + more}] and more
        assert chat.text('.turn footer span') == f'{n + 20} tokens, cut off' and chat.focused() == 'message'
    whole = chat.turns()
    chat.fill(max_tokens=250)
    chat.press('Go on with answer 1')
    chat.wait(lambda: chat.text('#error') and chat.finished())
    assert chat.turns() == whole and chat.text('.turn footer span') == '60 tokens, cut off'
    chat.fill(max_tokens=20)
    chat.say('two')
    chat.wait(chat.finished)
    assert [more.is_displayed() for more in chat.all('.more')] == [False, True]  # the first has a turn behind it


def test_a_sample_that_was_cut_goes_on(page):
    page.fill(prompt=PROMPT, seed=3, n=2, max_tokens=10)
    page['#go'].click()
    page.wait(lambda: page.samples() and page.finished())
    first, second = page.samples()
    page.press('Go on with sample 2')
    page.wait(page.finished)
    assert page.samples() == [first, *page.answers(prompt=second, seed=3 + 1 + 10, max_tokens=10)]
    assert [note.text for note in page.all('.sample footer span:first-child')] == [
        '10 tokens, cut off', '20 tokens, cut off']
    kept = page.samples()
    page.open()
    page.wait(page['#samples'].is_displayed)
    assert page.samples() == kept and page.all('.sample footer span')[0].text == '10 tokens, cut off'
    page.press('Go on with sample 1')
    page.wait(page.finished)
    assert page.samples() == [*page.answers(prompt=first, seed=3 + 10, max_tokens=10), kept[1]]


def test_what_is_removed_can_be_had_again(chat):
    """After New chat, Repeat and Edit, once each, also behind a reload; and the other way round."""
    for text in ('one', 'two', 'three'):
        chat.say(text)
        chat.wait(chat.finished)
    whole = chat.turns()
    assert not chat['#undo'].is_displayed()
    chat['#message'].send_keys('a draft')
    chat['#clear'].click()
    assert not chat.turns() and chat.text('#removed span') == '3 turns removed'
    chat['#undo'].click()
    assert chat.turns() == whole and not chat['#undo'].is_displayed()

    chat.press('Repeat turn 2')
    chat.wait(chat.finished)
    repeated = chat.turns()
    assert len(repeated) == 4 and repeated[3] != whole[3] and chat.text('#removed span') == '2 turns removed'
    for turns in (whole, repeated, whole):
        chat['#undo'].click()
        assert chat.turns() == turns and chat['#message'].get_property('value') == 'a draft'

    chat.press('Edit turn 1')
    assert chat['#message'].get_property('value') == 'one'
    chat.press('Edit turn 2')
    chat.press('Cancel turn 2')
    assert chat['#message'].get_property('value') == 'a draft'
    chat.press('Edit turn 1')
    chat.say('uno')
    assert chat.is_answered([dict(role='user', content='uno')])
    assert chat['#message'].get_property('value') == 'a draft'
    chat.fill(max_tokens=255)
    chat.press('Repeat turn 1')
    chat.wait(lambda: chat.text('#error') and chat.finished())  # a refused one removes nothing
    assert chat.turns()[0]['content'] == 'uno' and chat.text('#removed span') == '3 turns removed'
    chat.open()
    chat.wait(chat['#message'].is_displayed)
    assert chat['#message'].get_property('value') == 'a draft'
    chat['#undo'].click()
    assert chat.turns() == whole and not chat.text('#error')


def cut_off(page, offline):
    """Let the browser reach no server, and end the connections that there are; or let it reach them again."""
    page.browser.execute_cdp_cmd('Network.enable', {})
    page.browser.execute_cdp_cmd('Network.emulateNetworkConditions', {
        'offline': offline, 'latency': 0, 'downloadThroughput': -1, 'uploadThroughput': -1})
    for connection in [*page.client.process.server_state.connections]:
        page.client.process.loop.call_soon_threadsafe(connection.transport.abort)


def test_a_server_that_is_gone(chat):
    """What has come stays, the pane shows nothing old, the errors are the page's own; and then it is back."""
    chat.engine.allow(5)
    chat.say('one')
    chat.wait(lambda: chat.turns() and chat.turns()[1]['content'] and chat.text('#n-running') == '1')
    try:
        cut_off(chat, True)
        chat.wait(lambda: chat.text('#status') == 'not connected' and chat.finished())
        assert 'connection to the server was lost' in chat.text('#error') and chat.visible('#error')
        assert chat.text('#n-running') == '–' and not chat.all('#running li') and chat.text('#size') == 'not connected'
        assert chat.text('.turn footer span') == '5 tokens, not finished' and chat['.more'].is_displayed()
        chat.say('two')
        chat.wait(lambda: 'cannot be reached' in chat.text('#error') and chat.finished())
        assert 'fetch' not in chat.text('#error') and chat.visible('#error')
        assert len(chat.turns()) == 2 and chat['#message'].get_property('value') == 'two'
    finally:
        cut_off(chat, False)
    chat.wait(lambda: chat.text('#status') == 'connected')
    chat.engine.allow(float('inf'))
    said = [*chat.turns(), dict(role='user', content='two')]
    chat['#go'].click()
    assert chat.is_answered(said) and chat.text('#n-running') != '–' and not chat.text('#error')


def test_while_a_chat_model_loads(browser):
    """Nothing can be written yet; then the chat is there with the model's defaults, and the keyboard in its field."""
    tokenizer = JSONTokenizer(json_tokenizer(TEXT).json, chat_template=TEMPLATE)
    engine, there = drawing_engine(tokenizer), threading.Event()
    served = replace(served_by(engine, tokenizer=tokenizer), defaults={'temperature': .3, 'top_k': 5})
    with serving(engine, load=lambda: there.wait() and (engine, served)) as client:
        page = Page(browser, client, engine)
        browser.get(str(client.base_url))
        page.wait(lambda: 'being loaded' in page.text('#loading'))
        assert page.text('#status') == 'loading the model' and page['#loading'].is_displayed()
        assert not any(field.is_displayed() for field in page.all('textarea, input, button'))
        there.set()
        page.wait(lambda: page.text('#status') == 'connected')
        assert page.focused() == 'message' and page['#go'].text == 'Send'
        assert not page['#prompt'].is_displayed() and not page['#loading'].is_displayed()
        assert page['#temperature'].get_property('value') == '0.3' and page.text('output[for=temperature]') == '0.30'
        browser.get('about:blank')


def test_fields_have_the_names_of_their_labels(chat):
    """As the browser tells them to a screen reader; a click on the label gives the field the keyboard."""
    chat.open()
    assert chat.focused() == 'message'
    names = {'message': 'Message', 'temperature': 'Temperature', 'top_p': 'Top p', 'seed': 'Seed',
             'max_tokens': 'Tokens', 'system': 'System message'}
    for mode, more in (('chat', {}), ('continue', {'prompt': 'Prompt', 'n': 'Samples'})):
        chat[f'#modes label:has([value={mode}])'].click()
        for name, label in (names | more).items():
            if chat['#' + name].is_displayed():
                assert chat['#' + name].accessible_name == label
                chat[f'label[for={name}]'].click()
                assert chat.focused() == name
    assert [chat['#' + name].aria_role for name in ('temperature', 'top_p', 'n')] == ['slider', 'slider', 'spinbutton']
