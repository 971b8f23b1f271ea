"""Language models that score or oppose the policy: judges, opponents and simulated users.

Read in this order: `reward_model.py` (a trained reward model as a reward), `judges.py` (one verdict on all roles of an
episode), `chat_server.py` (a model behind a server), `llm_judge.py` (a model as a reward), `rubric.py` (several criteria in
one reward), `opponent.py` (one in a role).
"""
