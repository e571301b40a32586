"""The page of the cache in a browser: each step, what the slider's keys do, light and dark, wide and narrow."""
import base64
import io
import re

import matplotlib.image
import numpy as np
import pytest
import test_page
from conftest import sizes
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from test_debug_page import written
from test_page import check_look, shown

pytestmark, browser = test_page.pytestmark, test_page.browser


class Words:
    def decode(self, tokens):
        return 'a\n tag<b>'[tokens[0] % 8:] if tokens[0] % 5 else chr(97 + tokens[0])


@pytest.fixture(scope='module', params=sizes(['learned', 'ring'], ['learned', 'ring', 'uncached']))
def page(browser, request, tmp_path_factory):
    """The page of a run, open. page.data: what it has."""
    folder = tmp_path_factory.mktemp(request.param)
    page = test_page.Page(browser, None, None)
    page.model, page.data, _ = written(request.param, folder, tokenizer=Words())
    page.url, page.kind = (folder / 'page.html').as_uri(), request.param
    browser.get(page.url)
    yield page
    assert browser.get_log('browser') == []  # nothing was asked for, and nothing went wrong
    browser.get('about:blank')


def press(page, key):
    page['#slider'].send_keys(key)


def seen(page):
    """Texts by id, classes of the cells of rows, what the slider says and the height of the mask."""
    return page.browser.execute_script("""
        const $ = id => document.getElementById(id), cells = id => [...$(id).children]
        return {...Object.fromEntries(['number', 'title', 'says', 'tuple'].map(id => [id, $(id).textContent])),
                ...Object.fromEntries(['names', 'text', 'weights'].map(id => [id, cells(id).map(i => i.className)])),
                slots: cells('slots').map(i => i.textContent), slider: $('slider').value, mask: $('mask').height}""")


def test_the_keys_go_through_the_steps_and_each_says_what_it_does(page):
    press(page, Keys.HOME)
    kinds = {'learned': ['The prompt', *['One token'] * 5, *['The context is full'] * 6],
             'ring': ['The prompt', 'More of the prompt', *['A slot is used again'] * 11],
             'uncached': ['Without a cache'] * 12}[page.kind]
    for i, (f, title) in enumerate(zip(page.data['frames'], kinds, strict=True)):
        now, start, end, n = seen(page), f['start'], f['start'] + f['n'], len(f['rows'])
        assert (now['number'], now['title'], now['slider']) == (f'step {i + 1} of {len(kinds)}', title, str(i + 1))
        assert (f"cache_pos goes from {start} to {end}." in now['says']) == ('cache' in f)
        assert [name.split()[0] for name in now['names'][:n]] == [
            'computed' if position >= start else 'kept' for position in f['positions']]
        assert now['text'] == ['dropped'] * f['first'] + ['kept'] * start + ['computed'] * f['n'] + [
            'drawn'] * ('without' in f)
        assert f'cache_pos {start} → {end}' in now['tuple'] or 'cache' not in f
        assert [i for i, tick in enumerate(now['slots']) if tick == '▲'] == [
            slot for slot in f.get('cache', [])[2:] if slot < len(now['slots'])]
        assert ['hidden' in name for name in now['weights'][:n]] == np.isinf(f['numbers'][0, 0, 0]).tolist()
        assert now['mask'] == f['n']
        press(page, Keys.ARROW_RIGHT)
    assert f['first'] == (0 if page.kind == 'ring' else 6) and seen(page)['slider'] == str(i + 1)
    press(page, Keys.ARROW_LEFT)
    assert seen(page)['slider'] == str(i)


def pixels(page, selector):
    """The RGBA of a canvas, (height, width, 4)."""
    url = page.browser.execute_script('return document.querySelector(arguments[0]).toDataURL()', selector)
    return (255 * matplotlib.image.imread(io.BytesIO(base64.b64decode(url.split(',')[1])))).round()


def test_what_is_drawn_is_in_the_data(page):
    """In each layer and head: colours, the numbers of a column, the mask, and the counts."""
    data, step = page.data, len(page.data['frames']) - 2
    f = data['frames'][step]
    for layer, head in [(0, 3), (len(data['layers']) - 1, 1)]:
        page.browser.get('about:blank')
        page.browser.get(f"{page.url}#step={step + 1}&layer={data['layers'][layer]}&head={head}")
        assert page.text('#where').startswith(f"Layer {data['layers'][layer]}, head {head}: ")
        kept = data['rows'][:, layer, data['kv_head'][head]]
        for kind, name in enumerate('kv'):
            values = kept[f['rows'], kind].T / np.abs(kept[:, kind]).max()
            drawn = pixels(page, f'#{name}')[:, :values.shape[1]]
            np.testing.assert_allclose(drawn[..., 3], 255 * np.sqrt(np.abs(values)), atol=1)
            strong = np.abs(values) > .05
            assert ((drawn[..., 0] > 75) == (values < 0))[strong].all()
        scores, weights = f['numbers'][layer, head]
        mask = data['masks'][f['masks'][layer]].split(' ')
        drawn = pixels(page, '#mask')[:, :len(scores), 3] > 0
        assert [''.join(str(int(seen)) for seen in row) for row in drawn] == mask
        for key in (None, 0, len(scores) - 1):
            if key is not None:
                ActionChains(page.browser).move_to_element(page.all('#weights i')[key]).perform()
            key = int(weights.argmax()) if key is None else key
            said = page.text('#key')
            assert f"at position {f['positions'][key]}" in said and ('largest' in said) == (key == weights.argmax())
            assert ('not see' in said) == np.isinf(scores[key])
            if np.isfinite(scores[key]):
                score, weight = map(float, re.search(r'Score (-?[\d.]+), weight ([\d.]+) %', said).groups())
                assert abs(score - scores[key]) < .006 and abs(weight - 100 * weights[key]) < .06
        ActionChains(page.browser).move_to_element(page['#title']).perform()
    counted = [cell.get_property('textContent') for cell in page.all('tr + tr td')]
    sums = [sum(g.get(name, 0) for g in data['frames'][:step + 1]) for name in ('products', 'without')]
    for cell, n in zip(counted, (f['products'], sums[0], f['without'], sums[1])):
        assert float(cell.rstrip('KM')) * {'K': 1e3, 'M': 1e6}[cell[-1]] == pytest.approx(n, rel=.006)
    assert counted[5] == f'{sums[1] / sums[0]:.1f}x'


def test_plays_and_slides(page):
    """A tick of the clock comes when the test says so."""
    page.browser.get('about:blank')
    page.browser.get(page.url + '#step=4')
    page.browser.execute_script("""
        setInterval = tick => { window.tick = tick; return 1 }
        clearInterval = () => { window.tick = () => {} }
        arguments[0].value = 8
        arguments[0].oninput()""", page['#slider'])
    assert seen(page)['slider'] == '8'
    page['#play'].click()
    page.browser.execute_script('tick(); tick()')
    assert seen(page)['slider'] == '10' and page.text('#play') == 'Pause'
    page['#play'].click()
    page.browser.execute_script('tick()')
    assert seen(page)['slider'] == '10' and page.text('#play') == 'Play'
    press(page, Keys.END)
    page['#play'].click()  # from the beginning, up to the end
    assert seen(page)['slider'] == '1'
    last = len(page.data['frames']) - 1
    page.browser.execute_script('for (let i = 0; i < 20; i++) tick()')
    assert seen(page)['slider'] == str(last + 1) and page.text('#play') == 'Play'
    page['#back'].click()
    assert seen(page)['slider'] == str(last)
    page['#layer'].send_keys(Keys.ARROW_DOWN)
    assert page.text('#where').startswith('Layer 1') and seen(page)['slider'] == str(last)


@pytest.mark.parametrize('width, scheme', sizes([(390, 'dark')], [(390, 'dark'), (1280, 'light')]))
def test_looks(page, width, scheme, tmp_path):
    """Nothing is wider than its place, and text stands out. In the full run there are pictures in the test's folder."""
    with shown(page, width, scheme, 860):
        page.browser.get('about:blank')
        page.browser.get(page.url)
        for i in range(0, len(page.data['frames']), sizes(5, 1)):
            page.browser.execute_script('go(arguments[0])', i)
            check_look(page, scheme, '#says', '#text i', '#text i:last-child', '#model', '.name', '#key', '#apart',
                       '#play', '#names i', 'td')
            assert -1 <= page['#pick'].rect['x'] < page['#pick'].rect['x'] + page['#pick'].rect['width'] <= width
            assert sizes(True, i % 5) or page.browser.save_screenshot(str(tmp_path / f'{page.kind}-{i}-{width}.png'))
