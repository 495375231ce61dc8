def to_prompt(cfg, *args, **kwargs):
    def transform(example, tokenizer=None):
        return {'prompt': [{'role': 'user', 'content': example['question']}], 'answer': example['answer']}

    return transform, {'remove_columns': ['question']}


def exact_answer(completions, answer, **kwargs):
    return [float(a.split('####')[-1].strip() in c[0]['content']) for c, a in zip(completions, answer)]
