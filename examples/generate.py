"""Ask the embedded model from Python: greedy chat, then sampled completions.

python examples/generate.py
"""

from noria.runtime import LLM, SamplingParams

llm = LLM(model="smollm2", max_model_len=256, max_num_seqs=8)

questions = ["Name the capital of France.", "What is 7 plus 5?"]
conversations = [[{"role": "user", "content": question}] for question in questions]
outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=48))
for question, output in zip(questions, outputs, strict=True):
    print(f"{question}\n    {output.outputs[0].text}")

params = SamplingParams(n=2, temperature=0.8, top_p=0.95, seed=7, max_tokens=24)
for output in llm.generate(["The water wheel turns because"], params):
    for choice in output.outputs:
        print(f"{output.prompt}{choice.text}  [{choice.finish_reason}]")
