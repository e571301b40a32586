'use strict'
const $ = id => document.getElementById(id)
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties)
  element.append(...children)
  return element
}
const button = (textContent, ariaLabel, onclick, className = '') => make('button', {
  type: 'button', className: 'quiet small ' + className, textContent, ariaLabel, onclick})
const number = n => n.toLocaleString('en', {maximumFractionDigits: n < 10 ? 1 : 0})
const duration = ms => ms < 1000 ? number(Math.round(ms)) + ' ms' : (ms / 1000).toFixed(1) + ' s'
const count = (n, what) => `${number(n)} ${what}${n === 1 ? '' : 's'}`
const NUMBERS = ['temperature', 'top_p', 'seed', 'max_tokens'], FIELDS = [...NUMBERS, 'prompt', 'n', 'key', 'system']

// what the browser keeps: session for this tab, local for all

const NO_STORAGE = {getItem: () => null, removeItem() {}, setItem() { throw new Error('no storage') }}
function storage(kind) {
  try { return window[kind] ?? NO_STORAGE } catch { return NO_STORAGE }  // a browser may refuse it
}
const session = storage('sessionStorage'), local = storage('localStorage')
function keep(name, value) {
  try { session.setItem(name, value) } catch { session.removeItem(name) }  // there is no more room
}

// requests to the server

const GONE = 'The server cannot be reached. See whether it still runs and whether the network is up, then send again.'
const LOST = 'The connection to the server was lost in the middle of an answer. When it is back, go on or send again.'

// For `catch`: an error of the network as one with this message; that of a stop stays as it is.
const failed = message => error => { throw error.name === 'AbortError' ? error : new Error(message) }

async function ask(path, options = {}) {
  const headers = {'content-type': 'application/json'}
  if ($('key').value) headers.authorization = 'Bearer ' + $('key').value.replace(/[^ -ÿ]/g, '?')
  const response = await fetch(path, {...options, headers}).catch(failed(GONE))
  if (response.ok) return response
  if (response.status === 401) $('key-field').hidden = false
  const error = (await response.json().catch(() => null))?.error
  if (error?.param === 'max_tokens') $('settings').open = true
  const message = error?.message ?? `The server failed with status ${response.status}: send it later.`
  throw Object.assign(new Error(message.replaceAll('max_tokens', 'Tokens')), {code: error?.code})
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  for (let text = '';;) {
    const {value, done} = await reader.read().catch(failed(LOST))
    if (done) return
    const parts = (text + value).split('\n\n')
    text = parts.pop()
    for (const part of parts)  // others are comments, which say only that the server still works
      if (part.startsWith('data: {')) yield JSON.parse(part.slice(6))
  }
}

// Show an error where it is seen, as a sentence; without one, show none.
function tell(message = '') {
  $('error').textContent = message && message[0].toUpperCase() + message.slice(1) + (message.endsWith('.') ? '' : '.')
  if (message) $('error').scrollIntoView({block: 'nearest'})
}

// Markdown. HTML in it is text, and an image is a link: the page asks nobody but its server.

const UNSURE = /\n([-=`~*_#>|:+ \t]*|[ \t]*\d{1,9}[.)]?[ \t]*)$/  // a last line that may begin or end something
const markdown = new marked.Marked({
  breaks: true,
  tokenizer: {
    html() {},
    tag(text) { return /^<br *\/?>/i.test(text) ? {type: 'br', raw: text.slice(0, text.indexOf('>') + 1)} : undefined },
    escape(text) {  // the delimiters and blanks of mathematics stay
      const [raw] = /^\\[()[\]{}\\,;]/.exec(text) ?? []
      return raw ? {type: 'text', raw, text: raw} : false
    },
    del(text) { return text.startsWith('~~') ? false : undefined },  // 3~5 is a range
    def() {},  // of a link: what is shown of a block would depend on the blocks behind it
    emStrong(text, paragraph) { return paragraph.length > 4000 ? undefined : false }  // the time grows with its square
  },
  renderer: {
    heading({tokens, depth}) {  // below those of the page
      const tag = 'h' + Math.min(depth + 2, 6)
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`
    },
    image({href, text}) { return this.link({href, tokens: [{type: 'text', text: 'image: ' + (text || href)}]}) },
    checkbox({checked}) { return checked ? '☑ ' : '☐ ' }
  }
})
const ALLOWED = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_ATTR: ['href', 'start', 'align', 'class'], ADD_URI_SAFE_ATTR: ['start', 'align'],
  ALLOWED_TAGS: 'a blockquote br code del em h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul'.split(' '),
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i
}

// The elements of blocks that marked has read, in a fragment.
function elementsOf(blocks) {
  const made = DOMPurify.sanitize(markdown.parser(blocks), ALLOWED), wide = {tabIndex: 0, role: 'region'}
  for (const a of made.querySelectorAll('a')) Object.assign(a, {target: '_blank', rel: 'noopener noreferrer'})
  for (const table of made.querySelectorAll('table')) {
    const box = make('div', {className: 'wide', ariaLabel: 'Table', ...wide})
    table.replaceWith(box)
    box.append(table)
  }
  for (const pre of made.querySelectorAll('pre')) {
    const language = pre.firstChild.className.replace('language-', '') || 'code'
    const box = make('div', {className: 'code'}, make('div', {}, make('span', {textContent: language}),
                                                      button('Copy', 'Copy code', null, 'copy')))
    pre.replaceWith(box)
    box.append(Object.assign(pre, {ariaLabel: 'Code', ...wide}))
  }
  for (const block of made.children) if (!block.matches('.code')) block.dir = 'auto'  // Arabic and Hebrew begin right
  return made
}

// Make the children of an element, from this number on, those of another. What is alike stays, and with it a selection.
function patch(element, other, first = 0) {
  let old = element.childNodes[first]
  for (const node of [...other.childNodes]) {
    const next = old?.nextSibling
    if (!old) element.append(node)
    else if (old.nodeName === '#text' && node.nodeName === '#text') {
      const was = old.data, is = node.data
      let same = is.startsWith(was) ? was.length : 0
      while (same < was.length && was[same] === is[same]) same++
      if (was !== is) old.replaceData(same, was.length - same, is.slice(same))
    } else if (old.cloneNode().isEqualNode(node.cloneNode())) patch(old, node)
    else old.replaceWith(node)
    old = next
  }
  for (let next; old; old = next) { next = old.nextSibling; old.remove() }
}

// A view of a text that grows, as Markdown. Its blocks but the last stand, and are not read again.
class Markdown {
  constructor() {
    Object.assign(this, {element: make('div', {className: 'text'}), at: 0, n: 0})
  }
  show(whole, ended) {  // at: where the last block begins in it; n: the nodes before it
    const text = whole.replace(/\r\n?/g, '\n'), part = text.slice(this.at)
    try {
      const blocks = markdown.lexer(ended ? part : part.replace(UNSURE, ''))
      const last = Math.max(blocks.findLastIndex(block => block.type !== 'space'), 0)
      const made = elementsOf(blocks.slice(0, last)), n = made.childNodes.length
      made.append(elementsOf(blocks.slice(last)))
      patch(this.element, made, this.n)
      this.n += n
      for (const block of blocks.slice(0, last)) this.at += block.raw.length
    } catch (error) {
      if (!(error instanceof RangeError)) throw error  // blocks within blocks, without end
      patch(this.element, make('div', {}, make('p', {className: 'raw', textContent: part})), this.n)
    }
  }
}

// A view of a text as it is, behind what was given.
class Plain {
  constructor(name, given) {
    this.text = document.createTextNode('')
    this.element = make('pre', {tabIndex: 0, ariaLabel: name}, make('span', {className: 'given', textContent: given}),
                        this.text)
  }
  show(whole) { this.text.appendData(whole.slice(this.text.length)) }
}

async function copy(text, button) {
  try { await navigator.clipboard.writeText(text) } catch {  // a page of another machine has it only behind TLS
    const field = make('textarea', {value: text, className: 'unseen'})
    document.body.append(field)
    field.select()
    const done = document.execCommand('copy')
    field.remove()
    button.focus({preventScroll: true})
    if (!done) return tell('This browser does not let the page copy: select the text, and press Ctrl+C')
  }
  button.textContent = $('said').textContent = 'Copied'
  setTimeout(() => { button.textContent = 'Copy'; $('said').textContent = '' }, 1500)
}

// samples

const mine = new Set()  // ids of this page's requests
let running = null      // the request that runs: {abort, samples: those it fills, id: '' until the server tells it}

class Sample {  // goOn: continues it. view: shows its text, in scroller. The rest: its JSON before a reload
  constructor(name, goOn, view, scroller, kept = {}) {
    const {text = '', thought = '', n = 0, note = 'waiting', speed = '', cut = false} = kept
    Object.assign(this, {text, thought, n, view, scroller})
    this.note = make('span', {textContent: note})
    this.speed = make('span', {textContent: speed})
    const what = name.toLowerCase()
    this.more = button('Go on', 'Go on with ' + what, goOn, 'more')
    this.more.hidden = !cut
    this.buttons = make('div', {}, button('Copy', 'Copy ' + what, event => copy(this.text, event.target), 'copy'),
                        this.more)
    this.footer = make('footer', {}, this.note, this.speed, this.buttons)
    this.thoughts = make('details', {className: 'thoughts'}, make('summary'), make('div', {
      tabIndex: 0, role: 'region', ariaLabel: 'Thoughts of ' + what}, document.createTextNode('')))
    this.element = make('article', {className: 'sample', ariaLabel: name}, this.thoughts, view.element, this.footer)
    this.show(true)
  }
  show(ended) {
    this.view.show(this.text, ended)
    const [head, {firstChild: shown}] = this.thoughts.children
    this.thoughts.hidden = !this.thought
    head.textContent = ended || this.text ? 'Thoughts' : 'Thinking …'
    shown.appendData(this.thought.slice(shown.length))
  }
  begin(start) {  // a stream will add to it
    Object.assign(this, {start, first: 0, wait: 0, reason: null, n_before: this.n, note_before: this.note.textContent})
    this.note.textContent = 'waiting'
    this.more.hidden = true
  }
  reading({computed, n_prompt}) {
    if (this.n > this.n_before) return
    this.note.textContent = `reading ${number(computed)} of ${number(n_prompt)} tokens`
    this.element.style.setProperty('--read', computed / n_prompt * 100 + '%')
  }
  add(choice, now) {
    this.reason = choice.finish_reason
    this.text += choice.text ?? choice.delta.content ?? ''
    this.thought += choice.delta?.reasoning_content ?? ''
    const came = choice.token_ids.length
    this.n += came
    if (came && !this.first) { this.first = now; this.at_first = this.n }
    this.last = now
    this.timer ??= setTimeout(() => this.draw(), this.wait)
  }
  draw() {
    clearTimeout(this.timer)
    this.timer = null
    const begun = performance.now()
    const follow = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 30
    this.show(Boolean(this.reason))
    const more = this.n - this.at_first, seconds = (this.last - this.first) / 1000
    if (this.first) this.speed.textContent = duration(this.first - this.start) + ' to the first token' +
      (more && seconds ? `, ${number(more / seconds)} tokens/s` : '')
    this.say({stop: ', at its end', length: ', cut off'}[this.reason] ?? ' …')
    if (follow) this.scroller.scrollTop = this.scroller.scrollHeight
    this.wait = 5 * Math.max(0, performance.now() - begun - 5)  // a long text is shown less often
  }
  say(how) {
    this.note.textContent = count(this.n, 'token') + how
    this.element.style.removeProperty('--read')
  }
  end(why) {  // of the stream; why: if it has not come to an end of its own
    if (this.timer) this.draw()
    if (!this.reason) {
      this.show(true)
      this.say(', ' + why)
      if (this.n_before && this.n === this.n_before) this.note.textContent = this.note_before
    }
    this.more.hidden = this.reason === 'stop' || !this.text
  }
  toJSON() {
    return {text: this.text, thought: this.thought, n: this.n, note: this.note.textContent,
            speed: this.speed.textContent, cut: !this.more.hidden}
  }
}

function setRunning(request) {
  running = request
  $('stop').disabled = !running
  $('turns').ariaBusy = Boolean(running)
  for (const button of document.querySelectorAll('#go, #chats button, .turn button, .sample button'))
    button.disabled = Boolean(running) && !button.matches('.copy')
}

// Stream an answer to body into samples, and return whether there is one, all of it or the part before a stop or error.
async function stream(path, body, samples, use = () => {}) {
  for (const name of NUMBERS) body[name] ??= Number($(name).value)
  const controller = new AbortController(), start = performance.now()
  tell()
  setRunning({abort: () => controller.abort(), samples, id: ''})
  for (const sample of samples) sample.begin(start)
  let why = 'stopped'
  try {
    const response = await ask(path, {method: 'POST', signal: controller.signal,
                                      body: JSON.stringify({...body, stream: true, return_token_ids: true})})
    running.id = response.headers.get('x-request-id') + '-0'
    mine.add(running.id)
    samples.forEach((sample, i) => sample.element.style.setProperty('--colour', colour(running.id, i)))
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message)
      for (const choice of event.choices) samples[choice.index].add(choice, performance.now())
      if (event.usage) use(event.usage)
    }
    if (!samples.every(sample => sample.reason)) throw new Error(LOST)
  } catch (error) {
    if (error.name !== 'AbortError') { tell(error.message); why = 'not finished' }
  }
  for (const sample of samples) sample.end(why)
  if (atEnd) toEnd()  // buttons may have come below it
  setRunning(null)
  return samples.some(sample => sample.n || sample.reason)
}

async function generate() {
  if (running || !mode) return
  if (!$('message').value.trim()) $('message').value = ''  // blanks are no message
  if (!$('form').reportValidity()) return
  if (mode === 'chat') return say($('message').value)
  const before = completion, prompt = $('prompt').value, n = Number($('n').value)
  showCompletion(completionOf(prompt, Array(n).fill({})))
  if (!await stream('v1/completions', {prompt, n}, completion.samples)) showCompletion(before)
}

// completions

let completion = {prompt: '', samples: []}  // that is shown

// kept: the JSON of each sample, or {}.
function completionOf(prompt, kept) {
  const given = prompt.length > 400 ? '… ' + prompt.slice(-400) : prompt
  const samples = kept.map((each, i) => {
    const name = `Sample ${i + 1}`, view = new Plain(name, given)
    return new Sample(name, () => goOn(i), view, view.element, each)
  })
  const goOn = i => {
    const seed = Number($('seed').value) + i + samples[i].n
    stream('v1/completions', {prompt: prompt + samples[i].text, seed}, [samples[i]])
  }
  return {prompt, samples}
}

function showCompletion(shown) {
  completion = shown
  $('samples').replaceChildren(...shown.samples.map(sample => sample.element))
}

// turns of the chat

let mode = '', turns = []
let place = null  // the turn that the next message replaces, with those behind it; null: the message follows them all
let draft = ''    // what stood in the field before a message that is edited

class Turn {  // repeats: how often this message was sent again, each time with another seed
  constructor(i, {message, repeats = 0, found = '', answer = {}}) {
    Object.assign(this, {message, repeats})
    this.answer = new Sample(`Answer ${i + 1}`, () => goOn(this), new Markdown(), $('turns'), answer)
    this.found = make('span', {className: 'found', textContent: found})
    this.edit = button('Edit', `Edit turn ${i + 1}`, () => place === i ? edit() : edit(i, message))
    this.answer.buttons.before(this.found)
    this.answer.buttons.append(button('Repeat', `Repeat turn ${i + 1}`, () => say(message, i, this.repeats + 1)))
    this.element = make('div', {className: 'turn'}, make('div', {className: 'asked'},
      make('pre', {textContent: message, ariaLabel: `Message ${i + 1}`, dir: 'auto'}), this.edit), this.answer.element)
  }
  show({prompt_tokens: n, prompt_tokens_details: {cached_tokens: cached}}) {
    this.found.textContent = `${number(cached)} of ${number(n)} prompt tokens found`
  }
  toJSON() {
    return {message: this.message, repeats: this.repeats, found: this.found.textContent, answer: this.answer}
  }
}
const turnsOf = (kept, from = 0) => kept.map((each, i) => new Turn(from + i, each))

// The turns stay at their end, if they are there, when an error or a longer message takes room from them.
let atEnd = true
const toEnd = () => { $('turns').scrollTop = $('turns').scrollHeight }
$('turns').addEventListener('scroll', ({target: t}) => { atEnd = t.scrollHeight - t.scrollTop - t.clientHeight < 30 })
new ResizeObserver(() => atEnd && toEnd()).observe($('turns'))

// Let the next message, with this text, replace the turn i and those behind it; without an i, follow them all.
function edit(i = null, text = place === null ? $('message').value : draft) {
  draft = i === null ? '' : place === null ? $('message').value : draft
  place = i
  $('message').value = text
  $('message').focus()
  $('which').textContent = i === null ? 'Message' : `Message ${i + 1}, edited`
  turns.forEach((turn, k) => {
    turn.element.classList.toggle('replaced', i !== null && k >= i)
    turn.edit.textContent = k === i ? 'Cancel' : 'Edit'
    turn.edit.ariaLabel = `${turn.edit.textContent} turn ${k + 1}`
  })
}

function setTurns(changed) {
  turns = changed
  $('turns').replaceChildren(...turns.map(turn => turn.element))
  toEnd()
}

function messagesOf({system, turns}) {
  return [...system ? [{role: 'system', content: system}] : [],
          ...turns.flatMap(({message, answer}) => [{role: 'user', content: message},
                                                   {role: 'assistant', content: answer.text,
                                                    ...answer.thought && {reasoning_content: answer.thought}}])]
}
const conversation = () => messagesOf({system: $('system').value, turns})

const REPEAT = 1000  // what a repeat adds to the seed of its turn: few chats have so many turns

// Stream the answer of the last turn, or more of it. fields: of the body.
async function answer(turn, fields) {
  const seed = Number($('seed').value) + turns.length - 1 + REPEAT * turn.repeats + turn.answer.n
  const body = {seed, stream_options: {include_usage: true}, ...fields}
  keepChat()
  const came = await stream('v1/chat/completions', body, [turn.answer], usage => turn.show(usage))
  if (came) keepChat()
  return came
}

async function say(message, i = place ?? turns.length, repeats = 0) {
  const before = {turns, place}, turn = new Turn(i, {message, repeats}), n_behind = turns.length - i - 1
  if (n_behind > 0 && !confirm(`This deletes the ${count(n_behind, 'turn')} behind this one.`)) return
  setTurns([...turns.slice(0, i), turn])
  repeats ? edit() : edit(null, draft)
  if (await answer(turn, {messages: conversation().slice(0, -1)})) return
  setTurns(before.turns)  // the message comes back, and what was written since stays
  keepChat()
  const typed = $('message').value
  repeats ? edit() : edit(before.place, before.place === null && typed ? message + '\n' + typed : message)
}

function goOn(turn) {
  $('message').focus()
  answer(turn, {messages: conversation(), continue_final_message: true, add_generation_prompt: false})
}

// chats that the browser keeps, each under a key of its own, as JSON of {id, name, time, system, turns}

const CHAT = 'nanogpt chat '
const newChat = () => ({id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), name: '', time: 0})
let chat = newChat()  // {id, name, time} of the one that is shown, when this tab has last read or written it
let unkept = ''       // why there is no room for it, if so
const shownChat = () => ({...chat, system: $('system').value, turns})
const titleOf = ({name, turns}) => name || turns[0]?.message.trim().slice(0, 80) || 'New chat'

function chatOf(id) {
  try {
    const kept = JSON.parse(local.getItem(CHAT + id))
    return Array.isArray(kept.turns) ? {...kept, id} : null
  } catch { return null }
}

// All chats, the newest first.
function allChats() {
  const ids = Object.keys(local).filter(key => key.startsWith(CHAT)).map(key => key.slice(CHAT.length))
  const others = ids.filter(id => id !== chat.id).map(chatOf).filter(Boolean)
  return [...turns.length ? [shownChat()] : [], ...others.sort((a, b) => b.time - a.time)]
}

// Keep a chat. Returns why there is no room for it, if so.
function put({id, ...kept}) {
  try {
    local.setItem(CHAT + id, JSON.stringify(kept))
    return ''
  } catch { return local === NO_STORAGE ? 'it gives this page no storage' : 'its storage is full' }
}

function keepChat() {
  if (chatOf(chat.id)?.time > chat.time) chat = {...newChat(), name: chat.name}  // another tab has gone on: both are kept
  chat.time = Date.now()
  if (turns.length) unkept = put(shownChat())
  else { unkept = ''; local.removeItem(CHAT + chat.id) }
  listChats()
}

function listChats() {
  $('title').textContent = turns.length ? titleOf({...chat, turns}) : ''
  $('unkept').textContent = unkept && `The browser keeps nothing new of this chat: ${unkept}. Export it to keep it, or delete others.`
  if ($('shelf').open) $('list').replaceChildren(...allChats().map(rowOf))
}

function rowOf(kept) {
  const name = titleOf(kept), time = new Date(kept.time), isShown = kept.id === chat.id
  const row = make('li', {},
    make('button', {type: 'button', id: kept.id, className: 'name', textContent: name, ariaCurrent: String(isShown),
                    onclick: () => isShown ? focusText() : showChat(kept)}),
    make('time', {className: 'soft', dateTime: time.toISOString(),
                  textContent: time.toLocaleDateString('en', {day: 'numeric', month: 'short'})}),
    button('Rename', 'Rename ' + name, () => rename(kept)), button('Export', 'Export ' + name, () => exportChat(kept)),
    button('Delete', 'Delete ' + name, () => deleteChat(kept)))
  for (const each of row.querySelectorAll('button')) each.disabled = Boolean(running)
  return row
}

// Show another chat, or a new one.
function showChat({id, name, time, system, turns: others} = {...newChat(), turns: []}) {
  if (unkept && !confirm(`This chat is not kept: ${unkept}. Its newest turns will be lost.`)) return
  tell()
  chat = {id, name, time}
  if (system !== undefined) keep('system', $('system').value = system)
  unkept = ''
  setTurns(turnsOf(others))
  listChats()
  edit()
}

function rename(kept) {
  const name = prompt('Name of the chat', titleOf(kept))?.trim().slice(0, 200)
  if (name === undefined) return
  if (kept.id === chat.id) { chat.name = name; keepChat() }
  else { tell(put({...kept, name}) && 'There is no room for a longer name'); listChats() }
  $(kept.id).focus()
}

function exportChat(kept) {
  const file = JSON.stringify({messages: messagesOf(kept)}, null, 2)
  make('a', {href: 'data:application/json,' + encodeURIComponent(file),
             download: titleOf(kept).replace(/[^\p{L}\p{N}]+/gu, '-').slice(0, 60) + '.json'}).click()
}

function deleteChat(kept) {
  if (!confirm(`Delete “${titleOf(kept)}”?`)) return
  local.removeItem(CHAT + kept.id)
  if (kept.id !== chat.id) { unkept ? keepChat() : listChats(); return $('new').focus() }
  unkept = ''
  showChat()
}

const focusText = () => $(mode === 'chat' ? 'message' : 'prompt').focus({preventScroll: true})

// the cache

const hues = new Map()
function colour(id, index = 0) {
  if (!hues.has(id)) hues.set(id, (250 + hues.size * 137.5) % 360)  // the golden angle: neighbours differ most
  const light = [.69, .79, .61, .85][index % 4]
  return `oklch(${light} .11 ${hues.get(id)})`
}
const nameOfRequest = id => mine.has(id) ? 'this page' : id.replace(/^(chat)?cmpl-/, '').slice(0, 6)
const nameOf = sample => `${nameOfRequest(sample.id)} · sample ${sample.index + 1}`
const keyOf = sample => sample.id + '/' + sample.index

let state = null, squares = [], lastColour = [], cursor = -1, pick = null  // pick: the sample that is pointed at
let before = null  // the state from which the rate is counted

function layOut() {  // squares of at most 30 pixels, that together are some 330 pixels high if they can be
  const width = $('pool').clientWidth, n = squares.length
  const columns = Math.max(Math.ceil(Math.sqrt(n * width / 330)), Math.floor(width / 33)), cell = width / columns
  $('pool').style.setProperty('--columns', columns)
  $('pool').style.setProperty('--gap', (cell > 14 ? 3 : cell > 6 ? 2 : 1) + 'px')
  $('pool').style.setProperty('--stripe', Math.max(1.5, cell / 6) + 'px')
}

function paint(square, i, block) {
  const owners = block.samples, kind = owners.length > 1 ? 'shared' : owners.length ? 'used' :
    block.remembered ? 'remembered' : 'free'
  const colours = owners.slice(0, 4).map(([id, index]) => colour(id, index))
  const key = kind + colours.join()
  if (square.key === key) return kind
  square.key = key
  square.className = kind
  if (kind !== 'remembered') lastColour[i] = colours[0]  // none of a free one
  const stripes = colours.map((c, k) => `${c} calc(var(--stripe) * ${k}) calc(var(--stripe) * ${k + 1})`)
  square.style.background = kind === 'shared' ? `repeating-linear-gradient(135deg, ${stripes.join(', ')})` :
    lastColour[i] ?? ''
  return kind
}

function draw() {
  if (squares.length !== state.n_blocks) {
    squares = state.blocks.map((_, i) => { const square = make('i'); square.dataset.block = i; return square })
    $('pool').replaceChildren(...squares)
    layOut()
  }
  const count = {used: 0, shared: 0, remembered: 0, free: 0}
  state.blocks.forEach((block, i) => count[paint(squares[i], i, block)]++)
  for (const kind in count) $('n-' + kind).textContent = number(count[kind])
  $('size').textContent = `${number(state.n_blocks)} blocks of ${state.page_size} tokens`
  const {prefix_hits: hits, prefix_queries: queries, preemptions, generated_tokens: generated} = state.counters
  $('hits').textContent = `${queries ? Math.round(hits / queries * 100) : 0} %`
  $('hits-of').textContent = `${number(hits)} of ${number(queries)}`
  $('preemptions').textContent = number(preemptions)
  if (!before || state.time - before.time > 1) {
    if (before) $('rate').textContent = number((generated - before.generated) / (state.time - before.time))
    before = {time: state.time, generated}
  }
  drawList('running')
  drawList('waiting')
  running?.samples.forEach((sample, i) => {
    const shown = state.running.find(each => each.id === running.id && each.index === i)
    if (shown) sample.reading(shown)
  })
  inspect()
}

function drawList(which) {
  const list = $(which), rows = new Map([...list.children].map(row => [row.dataset.key, row]))
  const shown = state[which].slice(0, 64)
  $('n-' + which).textContent = number(state[which].length)
  shown.forEach((sample, place) => {
    const key = keyOf(sample)
    let row = rows.get(key)
    rows.delete(key)
    if (!row) {
      row = make('li', {tabIndex: 0}, make('i', {className: 'swatch'}), make('span'), make('span', {className: 'soft'}),
                 make('div', {className: 'bar'}, make('span')))
      row.dataset.key = key
      row.style.setProperty('--colour', colour(sample.id, sample.index))
    }
    row.children[1].textContent = nameOf(sample)
    row.children[2].textContent = `${number(sample.computed)} of ${number(sample.n_tokens)} tokens computed`
    row.lastChild.firstChild.style.width = sample.computed / sample.n_tokens * 100 + '%'
    if (list.children[place] !== row) list.insertBefore(row, list.children[place] ?? null)
  })
  for (const row of rows.values()) row.remove()
}

function inspect() {
  const sample = pick && [...state.running, ...state.waiting].find(sample => keyOf(sample) === pick)
  const block = cursor >= 0 && cursor < state.n_blocks ? state.blocks[cursor] : null
  const table = new Set(sample?.blocks)
  $('pool').classList.toggle('picking', table.size > 0)
  squares.forEach((square, i) => {
    square.classList.toggle('picked', table.has(i))
    square.classList.toggle('here', i === cursor)
  })
  const owners = new Set(block?.samples.map(([id, index]) => id + '/' + index))
  for (const row of $('running').children) row.classList.toggle('of-block', owners.has(row.dataset.key))
  const lines = sample ? aboutSample(sample) : block ? aboutBlock(block) :
    ['Point at a block to see its tokens, or at a request to see its block table. Arrow keys work in the pool.']
  patch($('inspector'), make('div', {}, ...lines))
}

function aboutSample(sample) {
  const chips = sample.blocks.map(i => make('span', {textContent: i ?? 'freed'}))
  return [`${nameOf(sample)}: ${sample.n_prompt} tokens of the prompt, ${sample.n_tokens - sample.n_prompt} new. ` +
          (chips.length ? 'Its block table:' : 'It has no blocks yet.'), make('div', {className: 'table'}, ...chips)]
}

function aboutBlock(block) {
  const owners = block.samples.map(([id, index]) => ({id, index})), times = {}
  for (const {id} of owners) times[nameOfRequest(id)] = (times[nameOfRequest(id)] ?? 0) + 1
  const shown = Object.entries(times).map(([name, n]) => name + (n > 1 ? ` × ${n}` : '')).join(', ')
  const whose = owners.length > 1 ? `shared by ${owners.length}: ${shown}` : owners.length ? nameOf(owners[0]) :
    block.remembered ? 'remembered: a prompt that begins alike finds it' : 'free'
  return [`Block ${cursor}, ${whose}`, make('pre', {textContent: block.text.replaceAll('\n', '⏎\n')})]
}

// Learn from /v1/models what is served.
function meet(model) {
  document.body.className = mode = model.chat ? 'chat' : 'continue'
  $('talk').hidden = $('settings').hidden = false
  $('loading').hidden = true
  for (const element of document.querySelectorAll('[data-mode]')) {
    element.hidden = element.dataset.mode !== mode
    for (const field of element.querySelectorAll('input, textarea')) field.disabled = element.hidden
  }
  $('go').textContent = model.chat ? 'Send' : 'Continue'
  $('max_tokens').max = model.max_model_len - 1
  const defaults = {...model.sampling_defaults, max_tokens: Math.min(model.chat ? 500 : 100, model.max_model_len >> 1)}
  for (const name of ['temperature', 'top_p', 'max_tokens'])
    if (name in defaults && !session.getItem(name)) { $(name).value = defaults[name]; show(name) }
  $('model').textContent = `${model.id}, ${number(model.max_model_len)} tokens of context`
  if (document.activeElement === document.body) focusText()
}

// Say why the server does not answer, and show no more what it last said of the cache.
function lose(error) {
  const gone = error.message === GONE, loading = error.code === 'loading'
  state = before = null
  for (const which of ['running', 'waiting']) { $(which).replaceChildren(); $('n-' + which).textContent = '–' }
  $('status').textContent = $('size').textContent =
    gone ? 'not connected' : loading ? 'loading the model' : error.message
  $('status').className = loading ? 'soft wait' : 'soft bad'
  $('loading').textContent = gone ? 'The server cannot be reached. The page goes on when it is back.' :
    loading ? 'The model is being loaded. The page goes on when it is there.' : $('status').textContent
  $('pane').className = 'off'
}

async function watch() {
  for (let met = false;;) {
    if (!document.hidden) try {
      if (!met) meet((await (await ask('v1/models', {signal: AbortSignal.timeout(9000)})).json()).data[0])
      state = await (await ask('cache', {signal: AbortSignal.timeout(9000)})).json()
      if (!met && $('error').textContent === GONE) tell()
      met = true
      $('status').textContent = 'connected'
      $('status').className = 'soft'
      $('pane').className = ''
      draw()
    } catch (error) {
      met = false
      lose(error)
    }
    await new Promise(resolve => setTimeout(resolve, met ? 200 : 1000))
  }
}

// keyboard, pointer, and what a reload keeps

$('form').addEventListener('submit', event => { event.preventDefault(); generate() })
$('form').addEventListener('invalid', event => event.target.closest('#settings')?.setAttribute('open', ''), true)
$('stop').addEventListener('click', () => { running?.abort(); focusText() })
addEventListener('keydown', event => {
  const sends = event.ctrlKey || event.metaKey ||
    event.target === $('message') && !event.shiftKey && !event.isComposing
  if (event.key === 'Enter' && sends) { event.preventDefault(); generate() }
  if (event.key === 'Escape' && !event.isComposing) running ? running.abort() : place !== null && edit()
})
$('turns').addEventListener('click', ({target}) => {
  const code = target.closest('.copy') && target.closest('.code')
  if (code) copy(code.lastChild.textContent.replace(/\n$/, ''), target)
})
const point = (block, sample) => { cursor = block; pick = sample; if (state) inspect() }
$('pool').addEventListener('pointerover', event => point(Number(event.target.dataset.block ?? -1), null))
$('pool').addEventListener('pointerleave', event => event.pointerType === 'mouse' && point(-1, null))
$('pool').addEventListener('focus', () => cursor < 0 && point(0, null))
$('pool').addEventListener('blur', () => point(-1, null))
$('pool').addEventListener('keydown', event => {
  const columns = getComputedStyle($('pool')).gridTemplateColumns.split(' ').length
  const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -cursor,
                End: squares.length - 1 - cursor}[event.key]
  if (step === undefined) return
  event.preventDefault()
  point(Math.max(0, Math.min(squares.length - 1, cursor + step)), null)
})
for (const list of ['running', 'waiting'])
  for (const [on, off] of [['pointerover', 'pointerleave'], ['focusin', 'focusout']]) {
    $(list).addEventListener(on, event => point(-1, event.target.closest('li')?.dataset.key ?? null))
    $(list).addEventListener(off, () => point(-1, null))
  }
function show(name) {
  const shown = document.querySelector(`output[for=${name}]`)
  if (shown) shown.textContent = Number($(name).value).toFixed(2)
  $('set').textContent = `temperature ${$('temperature').value}, top p ${$('top_p').value}, ` +
    count(Number($('max_tokens').value), 'token')
}
for (const name of FIELDS) {
  $(name).value = session.getItem(name) ?? $(name).value
  $(name).addEventListener('input', () => { keep(name, $(name).value); show(name); tell() })
  show(name)
}
for (const name of ['settings', 'shelf']) {
  $(name).open = session.getItem(name) === 'open'
  $(name).addEventListener('toggle', () => { keep(name, $(name).open ? 'open' : ''); listChats() })
}
$('new').addEventListener('click', () => turns.length ? showChat() : tell())
addEventListener('storage', ({key}) => {  // another tab has written
  const written = key === CHAT + chat.id && !running && place === null && !unkept && chatOf(chat.id)
  if (written) { chat.name = written.name; chat.time = written.time; setTurns(turnsOf(written.turns)) }
  listChats()
})
addEventListener('pagehide', () => {
  for (const sample of running?.samples ?? []) sample.end('not finished')
  if (running) keepChat()
  keep('shown', JSON.stringify({chat: shownChat(), unkept, completion,
                                draft: place === null ? $('message').value : draft}))
})
const kept = JSON.parse(session.getItem('shown'))
if (kept) {
  $('message').value = kept.draft
  const written = !kept.unkept && chatOf(kept.chat.id)  // by another tab since, perhaps
  showChat(written?.time > kept.chat.time ? written : kept.chat)
  unkept = kept.unkept
  showCompletion(completionOf(kept.completion.prompt, kept.completion.samples))
}
listChats()
addEventListener('resize', layOut)
watch()
