"""Chains of prompt, model and parser: in a batch, two at once, with a fallback, and one that streams."""

from langchain_anthropic import ChatAnthropic
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="gpt-4.1-mini", temperature=0)

joke = ChatPromptTemplate.from_template("Tell a joke about {topic}.") | model | StrOutputParser()
print(joke.batch([{"topic": "bears"}, {"topic": "bees"}, {"topic": "birds"}], {"max_concurrency": 2}))

poem = ChatPromptTemplate.from_messages([("system", "You are a poet."), ("user", "{topic}")]) | model
both = RunnableParallel(joke=joke, poem=poem | StrOutputParser(), topic=RunnablePassthrough())
print(sorted(both.invoke({"topic": "bears"}).items()))

facts = ChatPromptTemplate.from_template("Say in JSON how many legs {animal} have.") | model | JsonOutputParser()
steps = RunnableLambda(lambda animals: [{"animal": animal} for animal in animals]) | facts.map()
print(steps.invoke(["ants", "spiders"]))

broken = ChatOpenAI(model="gpt-4.1-broken", max_retries=0)
robust = broken.with_fallbacks([ChatAnthropic(model="claude-sonnet-4-5", max_tokens=100)]) | StrOutputParser()
print(robust.invoke("Are you there?"))

print([part for part in joke.with_config(run_name="comedian").stream({"topic": "ants"}) if part])
