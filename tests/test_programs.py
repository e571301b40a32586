"""The programs of docs/SERVING.md that are installed, each against serve.py with SmolLM2-135M-Instruct."""
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
from conftest import ENVIRONMENT, ROOT, SERVING, TIMEOUT, needs, sizes

needs(*SERVING)

from serving_process import started

PERSON = """
from typing import Literal
from pydantic import BaseModel
class Person(BaseModel):
    name: Literal['Ada', 'Grace', 'Barbara']
    age: Literal[36, 85]
"""
PYTHON = dict(openai=PERSON + """
import openai
client, how = openai.OpenAI(base_url=url, api_key='-'), dict(model=model, temperature=0)
chat = client.chat.completions
said = dict(messages=[dict(role='user', content='Who wrote the first program?')], max_tokens=200) | how
pieces = [chunk.choices[0].delta.content or '' for chunk in chat.create(stream=True, **said)]
assert ''.join(pieces) == chat.create(**said).choices[0].message.content
assert chat.parse(response_format=Person, **said).choices[0].message.parsed.age
tools = [openai.pydantic_function_tool(Person)]
choice = chat.parse(tools=tools, tool_choice='required', parallel_tool_calls=False, **said).choices[0]
assert choice.finish_reason == 'tool_calls' and choice.message.tool_calls[0].function.parsed_arguments.name
answer = client.responses.create(input='Who wrote the first program?', max_output_tokens=200, **how)
assert answer.output_text == ''.join(pieces)
assert client.responses.parse(input='Who?', text_format=Person, **how).output_parsed.name
""", litellm=PERSON + """
import litellm
how = dict(model='openai/' + model, api_base=url, api_key='-', max_tokens=200)
said = dict(messages=[dict(role='user', content='Who wrote the first program?')])
Person.model_validate_json(litellm.completion(response_format=Person, **said, **how).choices[0].message.content)
tool = dict(type='function', function=dict(name='Person', parameters=Person.model_json_schema()))
answer = litellm.completion(tools=[tool], tool_choice='required', parallel_tool_calls=False, **said, **how)
call = answer.choices[0].message.tool_calls[0]
Person.model_validate_json(call.function.arguments)
how['max_output_tokens'] = how.pop('max_tokens')
assert litellm.responses(input='Hi', **how).output[0].content[0].text
""", langchain_openai=PERSON + """
from langchain_openai import ChatOpenAI
llm = ChatOpenAI(base_url=url, api_key='-', model=model, max_tokens=200)
assert llm.with_structured_output(Person).invoke('Who wrote the first program?').name
assert llm.with_structured_output(Person, method='function_calling').invoke('Who wrote the first program?').name
call, *_ = llm.bind_tools([Person], tool_choice='any').invoke('Who wrote the first program?').tool_calls
Person(**call['args'])
assert ChatOpenAI(base_url=url, api_key='-', model=model, use_responses_api=True).invoke('Hi', max_tokens=9).content
""", pydantic_ai=PERSON + """
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
for kind in OpenAIChatModel, OpenAIResponsesModel:
    served = kind(model, provider=OpenAIProvider(base_url=url, api_key='-'))
    for output in Person, NativeOutput(Person):
        agent = Agent(served, output_type=output, model_settings=dict(max_tokens=200, temperature=0))
        assert agent.run_sync('Who wrote the first program?').output.age
""", agents=PERSON + """
import openai
from openai.types.shared import Reasoning
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
set_tracing_disabled(True)
called = []
@function_tool
def look_up(name: Literal['Ada', 'Grace']) -> str:
    called.append(name)
    return name + ' was born in 1815.'
served = OpenAIResponsesModel(model, openai.AsyncOpenAI(base_url=url, api_key='-'))
how = dict(name='historian', instructions='Be brief.', model=served)
settings = ModelSettings(max_tokens=200, temperature=0, reasoning=Reasoning(effort='low', summary='auto'))
assert Runner.run_sync(Agent(output_type=Person, model_settings=settings, **how), 'Who?').final_output.name
settings = ModelSettings(max_tokens=200, temperature=0, tool_choice='required', parallel_tool_calls=False)
agent = Agent(tools=[look_up], model_settings=settings, **how)
assert Runner.run_sync(agent, 'When was Ada born?').final_output and called
""", instructor=PERSON + """
import instructor, openai
client = instructor.from_openai(openai.OpenAI(base_url=url, api_key='-'))
said = dict(model=model, messages=[dict(role='user', content='Who wrote the first program?')], max_tokens=200)
assert client.chat.completions.create(response_model=Person, **said).name
""", outlines=PERSON + """
import openai, outlines
served = outlines.from_openai(openai.OpenAI(base_url=url, api_key='-'), model)
Person.model_validate_json(served('Who wrote the first program?', Person, max_tokens=200))
""", llm="""
import json, os, subprocess, tempfile
folder = tempfile.mkdtemp()
with open(folder + '/extra-openai-models.yaml', 'w') as f:
    json.dump([dict(model_id='smol', model_name=model, api_base=url, supports_schema=True, supports_tools=True)], f)
def llm(*words):
    return subprocess.run([sys.executable, '-m', 'llm', *words, '-m', 'smol', '-o', 'max_tokens', '200', '--key', '-'],
                          env=dict(os.environ, LLM_USER_PATH=folder), check=True, capture_output=True, text=True).stdout
assert llm('Say hello.').strip()
assert json.loads(llm('Invent a dog.', '--schema', '{"properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}'))
assert llm('-T', 'llm_version', 'Say hello.').strip()
""", lm_eval="""
from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
pairs = [('The capital of France is', ' Paris'), ('The sky is', ' blue, and the grass is green.'), ('', 'Hello.')]
asked = [Instance('loglikelihood', {}, pair, i) for i, pair in enumerate(pairs)]
ours = LocalCompletionsAPI(model=model, base_url=url + '/completions', tokenizer=folder)
theirs = HFLM(pretrained=folder, device='cpu', batch_size=1, dtype='float32')
for (a, is_greedy), (b, was_greedy) in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked)):
    assert abs(a - b) < 1e-3 and is_greedy == was_greedy, (a, b)
until = [Instance('generate_until', {}, ('The sky is', dict(until=['.'], max_gen_toks=9, do_sample=False)), 0)]
assert ours.generate_until(until) == theirs.generate_until(until)
chat = LocalChatCompletion(model=model, base_url=url + '/chat/completions', tokenizer=folder, eos_string='<|im_end|>')
said = JsonChatStr(json.dumps([dict(role='user', content='Hi')]))
assert chat.generate_until([Instance('generate_until', {}, (said, dict(until=['<|im_end|>'], max_gen_toks=9)), 0)])[0]
""")
NODE = dict(openai="""
const OpenAI = require('openai'), client = new OpenAI({baseURL: url, apiKey: '-'})
const how = {model, temperature: 0}, messages = [{role: 'user', content: 'Who wrote the first program?'}]
const chat = await client.chat.completions.create({...how, messages, max_tokens: 200})
let text = ''
for await (const chunk of await client.chat.completions.create({...how, messages, max_tokens: 200, stream: true}))
  text += chunk.choices[0].delta.content ?? ''
const answer = await client.responses.create({...how, input: messages[0].content, max_output_tokens: 200})
if (text != chat.choices[0].message.content || text != answer.output_text) throw [text, answer]
const parameters = {type: 'object', properties: {name: {enum: ['Ada', 'Grace']}}, required: ['name']}
const call = {...how, messages, tool_choice: 'required', tools: [{type: 'function', function: {name: 'f', parameters}}]}
const done = await client.chat.completions.stream({...call, max_tokens: 200}).finalChatCompletion()
JSON.parse(done.choices[0].message.tool_calls[0].function.arguments).name.length
""", **{'@ai-sdk/openai-compatible': """
const {createOpenAICompatible} = require('@ai-sdk/openai-compatible')
const {generateObject, generateText, jsonSchema, tool} = require('ai')
const served = createOpenAICompatible({name: 'ours', baseURL: url, supportsStructuredOutputs: true})(model)
const schema = jsonSchema({type: 'object', properties: {name: {enum: ['Ada', 'Grace']}}, required: ['name'],
                           additionalProperties: false})
const prompt = 'Who wrote the first program?'
const {object} = await generateObject({model: served, schema, prompt, maxOutputTokens: 200})
if (!object.name) throw object
const {toolCalls} = await generateText({model: served, prompt, tools: {f: tool({inputSchema: schema})},
                                        toolChoice: 'required', maxOutputTokens: 200})
if (!toolCalls[0].input.name) throw toolCalls
"""})


OFFLINE = dict(HF_HUB_OFFLINE='1', LITELLM_LOCAL_MODEL_COST_MAP='True', OPENAI_API_KEY='-')


@pytest.fixture(scope='module')
def server(real_model):
    """(the address of the API, the model's name), for a server whose template has tools."""
    with started(ROOT, 'serve.py', f'--init_from={real_model}', '--port=0', '--speculate=off',
                 '--chat_template=chat/smollm2_tools.jinja', '--name=smol') as (_, _, address):
        yield f'{address}v1', 'smol'


@pytest.fixture(scope='module')
def folder(real_model, tmp_path_factory):
    """The same model for transformers."""
    folder = tmp_path_factory.mktemp('model') / 'hf'
    subprocess.run([sys.executable, 'export.py', f'--init_from={real_model}', f'--path={folder}'], cwd=ROOT, check=True)
    return str(folder)


quick = pytest.mark.skipif(sizes(True, False), reason="programs are tried with --full")


@quick
@pytest.mark.parametrize('program', PYTHON)
def test_a_program_in_python(program, server, request):
    if find_spec(program) is None:
        pytest.skip(f"{program} is not installed")
    folder = request.getfixturevalue('folder') if program == 'lm_eval' else ''
    script = 'import json, sys\nurl, model, folder = sys.argv[1:]\n' + PYTHON[program]
    done = subprocess.run([sys.executable, '-c', script, *server, folder], capture_output=True, text=True,
                          timeout=TIMEOUT, env=ENVIRONMENT | OFFLINE)
    assert done.returncode == 0, done.stderr[-3000:]


@quick
@pytest.mark.parametrize('program', NODE)
def test_a_program_in_node(program, server):
    path = os.environ.get('NODE_PATH', '')
    if not shutil.which('node') or not os.path.isdir(os.path.join(path, program)):
        pytest.skip(f"{program} is not in NODE_PATH")
    script = '(async ([url, model]) => {' + NODE[program] + '})(process.argv.slice(1)).catch(e => {throw e})'
    done = subprocess.run(['node', '-e', script, *server], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
