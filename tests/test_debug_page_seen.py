"""The page of the cache in a browser: each step, what the keys do, light and dark, wide and narrow."""
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


@pytest.fixture(scope='module', params=['learned', 'ring', 'uncached'])
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


def press(page, *keys):
    ActionChains(page.browser).send_keys(*keys).perform()


def classes(page, row):
    return page.browser.execute_script('return [...document.querySelectorAll(arguments[0])].map(i => i.className)', row)


def test_the_keys_go_through_the_steps_and_each_says_what_it_does(page):
    press(page, Keys.HOME)
    kinds = {'learned': ['The prompt', *['One token'] * 5, *['The context is full'] * 6],
             'ring': ['The prompt', 'More of the prompt', *['A slot is used again'] * 11],
             'uncached': ['Without a cache'] * 12}[page.kind]
    n_dropped = 0
    for i, (f, title) in enumerate(zip(page.data['frames'], kinds, strict=True)):
        assert page.text('#number') == f'step {i + 1} of {len(kinds)}' and page.text('#title') == title
        assert int(page['#slider'].get_property('value')) == i
        cached, end, says = 'cache' in f, f['start'] + f['n'], page.text('#says')
        assert (f"cache_pos goes from {f['start']} to {end}." in says) == cached
        assert f"cache_pos {f['start']} → {end}" in page.text('#tuple') or not cached
        states = ['computed' if p >= f['start'] else 'kept' for p in f['positions']]
        assert [name.split()[0] for name in classes(page, '#names i')][:len(states)] == states
        assert classes(page, '#text i') == ['dropped'] * f['first'] + ['kept'] * f['start'] + [
            'computed'] * f['n'] + ['drawn'] * ('without' in f)
        ticks = [tick.get_property('textContent') for tick in page.all('#slots i')]
        assert not cached or f['cache'][2] >= len(ticks) or ticks[f['cache'][2]] == '▲'
        hidden = ['hidden' in name for name in classes(page, '#weights i')][:len(states)]
        assert hidden == np.isinf(f['numbers'][0, 0, 0]).tolist()
        assert page.browser.execute_script('const m = document.getElementById("mask"); return m.height') == f['n']
        n_dropped = max(n_dropped, f['first'])
        press(page, Keys.ARROW_RIGHT)
    assert n_dropped == (0 if page.kind == 'ring' else 6) and page['#slider'].get_property('value') == str(i)
    press(page, Keys.ARROW_LEFT)
    assert page.text('#number').startswith(f'step {i} of')


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
    page.browser.get('about:blank')
    page.browser.get(page.url + '#step=4')
    page.browser.execute_script('const s = arguments[0]; s.value = 8; s.dispatchEvent(new Event("input"))', page['#slider'])
    assert page.text('#number').startswith('step 9 of')
    press(page, ' ')
    page.wait(lambda: page.text('#number').startswith('step 11 of'))
    page['#play'].click()
    number = page.text('#number')
    assert page.text('#play') == 'Play'
    press(page, Keys.END)
    page['#play'].click()  # from the beginning
    assert page.text('#number') == number.replace(number.split()[1], '1') and page.text('#play') == 'Pause'
    page['#play'].click()
    page['#next'].click()
    page['#layer'].send_keys(Keys.ARROW_DOWN)
    assert page.text('#where').startswith('Layer 1') and page.text('#number').startswith('step 2 of')


@pytest.mark.parametrize('width, scheme', [(390, 'dark'), (1280, 'light')])
def test_looks(page, width, scheme, tmp_path):
    """Nothing is wider than its place in any step, and text stands out; pictures of some steps in the full run."""
    with shown(page, width, scheme, 860):
        page.browser.get('about:blank')
        page.browser.get(page.url)
        for i in range(len(page.data['frames'])):
            check_look(page, scheme, '#says', '#text i', '#text i:last-child', '#model', '.name', '#key', '#apart', '#play',
                       '#names i', 'td', '#theme')
            box = page.browser.execute_script('const b = arguments[0].getBoundingClientRect(); return [b.left, b.right]',
                                              page['#pick'])
            assert -1 <= box[0] < box[1] <= width
            assert sizes(True, i % 5) or page.browser.save_screenshot(str(tmp_path / f'{page.kind}-{i}-{width}.png'))
            press(page, Keys.ARROW_RIGHT)
        page['#theme'].click()
        check_look(page, {'dark': 'light', 'light': 'dark'}[scheme], '#says', '#text i')
