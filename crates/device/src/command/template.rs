//! Command templates: command lines with placeholders for parameter values.

use std::fmt;

/// Reason why a text is not a command template, an error of its author.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// Empty command.
    #[error("the command is empty")]
    Empty,
    /// Unterminated quotation.
    #[error("position {position}: the quotation does not end")]
    Quote {
        /// Position of its first character, from 1.
        position: usize,
    },
    /// Unmatched brace.
    #[error("position {position}: a brace that is not a placeholder (write {{{{ or }}}} for one that stays)")]
    Brace {
        /// Position of the character, from 1.
        position: usize,
    },
    /// Placeholder with an unknown name.
    #[error(
        "position {position}: {{{name}}} is not a parameter; there are {known} (write {{{{ for a brace that stays)"
    )]
    Unknown {
        /// Position of the character, from 1.
        position: usize,
        /// The name.
        name: String,
        /// Names that are known.
        known: String,
    },
    /// Placeholder `{*name}`, for words, within a word.
    #[error(
        "position {position}: {{*{name}}} is the words of a value, and stands alone (write {{{name}}} for a part of one)"
    )]
    Beside {
        /// Position of the character, from 1.
        position: usize,
        /// The name.
        name: String,
    },
    /// Shell syntax in a command that is started without a shell.
    #[error(
        "position {position}: `{found}` is for a shell, and this is started without one (add --shell, or quote it)"
    )]
    Shell {
        /// Position of the character, from 1.
        position: usize,
        /// The symbol.
        found: char,
    },
}

/// Part of a word.
#[derive(Debug, Clone, PartialEq, Eq)]
enum WordPart {
    Text(String),
    Value(String),
    /// All words of a value, possibly none; alone.
    Words(String),
}

/// Command template, such as `./app --tile {tile}`. `{*flags}` expands to the words of the value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandTemplate {
    words: Vec<Vec<WordPart>>,
    /// Names whose values a shell finds in its environment; `None` without a shell.
    environment: Option<Vec<String>>,
    stays_after: Option<usize>,
}

/// Command line: words, and additional environment variables.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Invocation {
    /// The program and its arguments.
    pub words: Vec<String>,
    /// Additional environment variables.
    pub variables: Vec<(String, String)>,
    /// Number of the words that start a persistent worker process of ours, which takes the other words as
    /// jobs; `None` for a process per run.
    pub stays_after: Option<usize>,
}

impl Invocation {
    /// Makes an invocation without additional variables.
    pub fn new(words: Vec<String>) -> Invocation {
        Invocation { words, variables: Vec::new(), stays_after: None }
    }

    /// Parses a command without placeholders, in which braces are ordinary characters: for `sh -c` if
    /// `shell`, else as [`CommandTemplate::words`] does.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn parse(text: &str, shell: bool) -> Result<Invocation, TemplateError> {
        if !shell {
            return Ok(CommandTemplate::read_words(text, None)?.with(&|_| String::new()));
        }
        match text.trim() {
            "" => Err(TemplateError::Empty),
            _ => Ok(Invocation::new(["sh", "-c", text].map(str::to_owned).into())),
        }
    }
}

/// Formats the command line for a shell.
impl fmt::Display for Invocation {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        self.variables.iter().try_for_each(|(name, value)| write!(out, "{name}={} ", quoted(value)))?;
        out.write_str(&self.words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" "))
    }
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Symbols outside of quotes that only a shell understands.
const SHELL_SYMBOLS: &str = "|&;<>$`*?#~()";

impl CommandTemplate {
    /// Parses a template for a command that is started without a shell: words separated by blanks, quoted as
    /// in a shell. A value becomes a part of one word, unless its placeholder is `{*name}`.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn words(text: &str, names: &[&str]) -> Result<CommandTemplate, TemplateError> {
        CommandTemplate::read_words(text, Some(names))
    }

    /// Parses words; without names, braces are ordinary text.
    fn read_words(text: &str, names: Option<&[&str]>) -> Result<CommandTemplate, TemplateError> {
        let mut words: Vec<Vec<WordPart>> = Vec::new();
        let mut word: Option<Vec<WordPart>> = None;
        let mut reader = CommandReader::new(text);
        while let Some((position, c)) = reader.next() {
            let quote = reader.quote;
            match (quote, c) {
                (None, c) if c.is_whitespace() => words.extend(word.take()),
                (None, '\'' | '"') | (Some('\''), '\'') | (Some('"'), '"') => {
                    word.get_or_insert_default();
                    reader.turn(position, c);
                }
                (None, '\\') => push(word.get_or_insert_default(), reader.next().map_or('\\', |(_, c)| c)),
                (Some('"'), '\\') => match reader.peek() {
                    Some(next @ ('"' | '\\' | '$' | '`')) => {
                        reader.next();
                        push(word.get_or_insert_default(), next);
                    }
                    _ => push(word.get_or_insert_default(), c),
                },
                (_, '{' | '}') => {
                    let text = || Ok(WordPart::Text(c.to_string()));
                    let part = names.map_or_else(text, |names| reader.brace(position, c, names))?;
                    if let WordPart::Words(name) = &part {
                        let is_alone = word.is_none() && reader.peek().is_none_or(char::is_whitespace);
                        // The first word is the program.
                        if quote.is_some() || !is_alone || words.is_empty() {
                            return Err(TemplateError::Beside { position, name: name.clone() });
                        }
                    }
                    add(word.get_or_insert_default(), part);
                }
                (None, found) if SHELL_SYMBOLS.contains(found) => {
                    return Err(TemplateError::Shell { position, found });
                }
                _ => push(word.get_or_insert_default(), c),
            }
        }
        reader.end()?;
        words.extend(word);
        if words.is_empty() {
            Err(TemplateError::Empty)
        } else {
            Ok(CommandTemplate { words, environment: None, stays_after: None })
        }
    }

    /// Parses a template for `sh -c`. Values are passed in environment variables, so that none is interpreted
    /// as code.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn shell(text: &str, names: &[&str]) -> Result<CommandTemplate, TemplateError> {
        let (mut script, mut used): (String, Vec<String>) = (String::new(), Vec::new());
        let mut reader = CommandReader::new(text);
        while let Some((position, c)) = reader.next() {
            let quote = reader.quote;
            match (quote, c) {
                (None, '\'' | '"') | (Some('\''), '\'') | (Some('"'), '"') => {
                    reader.turn(position, c);
                    script.push(c);
                }
                (None | Some('"'), '\\') => {
                    script.push(c);
                    script.extend(reader.next().map(|(_, c)| c));
                }
                // Variable of the shell.
                (None | Some('"'), '$') if reader.peek() == Some('{') => {
                    script.push(c);
                    while let Some((_, c)) = reader.next() {
                        script.push(c);
                        if c == '}' {
                            break;
                        }
                    }
                }
                (_, '{' | '}') => {
                    let part = reader.brace(position, c, names)?;
                    let (name, is_words) = match part {
                        WordPart::Text(text) => {
                            script += &text;
                            continue;
                        }
                        WordPart::Value(name) => (name, false),
                        WordPart::Words(name) if quote.is_some() => {
                            return Err(TemplateError::Beside { position, name });
                        }
                        WordPart::Words(name) => (name, true),
                    };
                    let variable = format!("${{{}}}", CommandTemplate::variable(&name));
                    script += &match quote {
                        None if is_words => variable,
                        None => format!("\"{variable}\""),
                        Some('"') => variable,
                        Some(_) => format!("'\"{variable}\"'"),
                    };
                    if !used.contains(&name) {
                        used.push(name);
                    }
                }
                _ => script.push(c),
            }
        }
        reader.end()?;
        if script.trim().is_empty() {
            return Err(TemplateError::Empty);
        }
        for name in names.iter().filter(|name| names_variable(&script, &CommandTemplate::variable(name))) {
            if !used.iter().any(|known| known == name) {
                used.push((*name).to_owned());
            }
        }
        let words = ["sh", "-c", &script].map(|word| vec![WordPart::Text(word.to_owned())]).into();
        Ok(CommandTemplate { words, environment: Some(used), stays_after: None })
    }

    /// Marks the first `n_words` words as those that start a persistent worker: see
    /// [`Invocation::stays_after`].
    pub fn staying_after(self, n_words: usize) -> CommandTemplate {
        CommandTemplate { stays_after: Some(n_words), ..self }
    }

    /// Quotes a word for a template that is started without a shell.
    pub fn quoted(word: &str) -> String {
        quoted(word).replace('{', "{{").replace('}', "}}")
    }

    /// Words without placeholders, `None` for the others; of a shell script, those that look like words.
    pub fn constant_words(&self) -> Vec<Option<String>> {
        let constant = |word: &Vec<WordPart>| {
            let texts = word.iter().map(|part| match part {
                WordPart::Text(text) => Some(text.as_str()),
                WordPart::Value(_) | WordPart::Words(_) => None,
            });
            texts.collect::<Option<String>>()
        };
        if self.environment.is_none() {
            return self.words.iter().map(constant).collect();
        }
        let script = self.words.last().and_then(constant).unwrap_or_default();
        let is_end = |c: char| c.is_whitespace() || "|&;<()`'\"{}".contains(c);
        // A redirection is a separate word, so that it is seen before its file.
        let words = script.replace('>', " > ");
        let words = words.split(is_end).filter(|word| !word.is_empty());
        words.map(|word| Some(word.to_owned()).filter(|word| !word.contains('$'))).collect()
    }

    /// Environment variable that passes a value to a shell, such as one that ends with `sizes_0` for
    /// `sizes[0]`.
    pub fn variable(name: &str) -> String {
        format!("TILEWRIGHT_{}", name.replace('[', "_").replace(']', ""))
    }

    /// Whether the template has a placeholder for this value.
    pub fn reads(&self, name: &str) -> bool {
        let is_part =
            |part: &WordPart| matches!(part, WordPart::Value(known) | WordPart::Words(known) if known == name);
        self.words.iter().flatten().any(is_part) || self.environment.iter().flatten().any(|known| known == name)
    }

    /// Expands the template with these values.
    pub fn with(&self, value: &dyn Fn(&str) -> String) -> Invocation {
        let text = |part: &WordPart| match part {
            WordPart::Text(text) => text.clone(),
            WordPart::Value(name) | WordPart::Words(name) => value(name),
        };
        let words = |word: &Vec<WordPart>| match &word[..] {
            [WordPart::Words(name)] => value(name).split_whitespace().map(str::to_owned).collect(),
            parts => vec![parts.iter().map(text).collect::<String>()],
        };
        Invocation {
            words: self.words.iter().flat_map(words).collect(),
            variables: self
                .environment
                .iter()
                .flatten()
                .map(|name| (CommandTemplate::variable(name), value(name)))
                .collect(),
            stays_after: self.stays_after,
        }
    }
}

/// Whether a script names a variable.
fn names_variable(script: &str, variable: &str) -> bool {
    let goes_on = |rest: &str| rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    script.match_indices(variable).any(|(at, _)| !goes_on(&script[at + variable.len()..]))
}

fn push(word: &mut Vec<WordPart>, c: char) {
    add(word, WordPart::Text(c.to_string()));
}

fn add(word: &mut Vec<WordPart>, part: WordPart) {
    match (word.last_mut(), part) {
        (Some(WordPart::Text(text)), WordPart::Text(more)) => *text += &more,
        (_, part) => word.push(part),
    }
}

/// Reader of a command by characters, which tracks the open quotation.
struct CommandReader<'a> {
    rest: std::iter::Peekable<std::iter::Enumerate<std::str::Chars<'a>>>,
    quote: Option<char>,
    quote_at: usize,
}

impl<'a> CommandReader<'a> {
    fn new(text: &'a str) -> CommandReader<'a> {
        CommandReader { rest: text.chars().enumerate().peekable(), quote: None, quote_at: 0 }
    }

    /// Next character with its position, from 1.
    fn next(&mut self) -> Option<(usize, char)> {
        self.rest.next().map(|(at, c)| (at + 1, c))
    }

    fn peek(&mut self) -> Option<char> {
        self.rest.peek().map(|(_, c)| *c)
    }

    /// Opens or closes a quotation.
    fn turn(&mut self, position: usize, quote: char) {
        self.quote = if self.quote.is_none() { Some(quote) } else { None };
        self.quote_at = position;
    }

    /// Parses the rest of a brace: a placeholder, or a brace that is written twice.
    fn brace(&mut self, position: usize, brace: char, names: &[&str]) -> Result<WordPart, TemplateError> {
        if self.peek() == Some(brace) {
            self.next();
            return Ok(WordPart::Text(brace.to_string()));
        }
        let mut name = String::new();
        while brace == '{'
            && let Some((_, c)) = self.next()
        {
            if c == '}' {
                let (name, part): (_, fn(String) -> WordPart) = match name.strip_prefix('*') {
                    Some(name) => (name.to_owned(), WordPart::Words),
                    None => (name, WordPart::Value),
                };
                return match names.contains(&name.as_str()) {
                    true => Ok(part(name)),
                    false => Err(TemplateError::Unknown { position, name, known: names.join(", ") }),
                };
            }
            name.push(c);
        }
        Err(TemplateError::Brace { position })
    }

    fn end(&self) -> Result<(), TemplateError> {
        match self.quote {
            Some(_) => Err(TemplateError::Quote { position: self.quote_at }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 2] = ["tile", "dir"];

    fn value(name: &str) -> String {
        match name {
            "tile" => "8; rm -rf $HOME '\"`".to_owned(),
            other => format!("<{other}>"),
        }
    }

    #[test]
    fn braces_of_a_command_without_values_stay() {
        let words = |text: &str| Invocation::parse(text, false).map(|invocation| invocation.words);
        assert_eq!(words("awk '{print $1}' {a,b} \\{ }").unwrap(), ["awk", "{print $1}", "{a,b}", "{", "}"]);
        assert_eq!(words("a | b"), Err(TemplateError::Shell { position: 3, found: '|' }));
        assert_eq!(words(" "), Err(TemplateError::Empty));
        assert_eq!(Invocation::parse("\t", true), Err(TemplateError::Empty));
        let script = "echo ${HOME} {x}";
        assert_eq!(Invocation::parse(script, true).unwrap().words, ["sh", "-c", script]);
    }

    #[test]
    fn a_value_is_a_part_of_one_word() {
        let words = |text: &str| CommandTemplate::words(text, &NAMES).unwrap().with(&value).words;
        let tile = value("tile");
        assert_eq!(words("./app --tile {tile} -x"), ["./app", "--tile", &tile, "-x"]);
        assert_eq!(
            words(r#" a'b c'"d{tile}" \  "e\"f\g" '' {{}} "#),
            [format!("ab cd{tile}").as_str(), " ", r#"e"f\g"#, "", "{}"]
        );
        assert_eq!(words("cc -o {dir}/app.{tile}"), ["cc", "-o", format!("<dir>/app.{tile}").as_str()]);
        assert_eq!(words("é {dir}"), ["é", "<dir>"]);
    }

    #[test]
    fn a_value_may_be_a_place_of_a_list() {
        let value = |name: &str| format!("<{name}>");
        let names = ["sizes[0]", "sizes[1]"];
        let words = CommandTemplate::words("f {sizes[0]}x{sizes[1]}", &names).unwrap().with(&value).words;
        assert_eq!(words, ["f", "<sizes[0]>x<sizes[1]>"]);
        let shell = CommandTemplate::shell("f {sizes[0]} $TILEWRIGHT_sizes_1", &names).unwrap().with(&value);
        assert_eq!(shell.words[2], "f \"${TILEWRIGHT_sizes_0}\" $TILEWRIGHT_sizes_1");
        let found = [("TILEWRIGHT_sizes_0", "<sizes[0]>"), ("TILEWRIGHT_sizes_1", "<sizes[1]>")];
        assert_eq!(shell.variables, found.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }

    #[test]
    fn what_is_no_command_is_refused_with_its_position() {
        let check = |text: &str, expected: &str| {
            assert_eq!(CommandTemplate::words(text, &NAMES).unwrap_err().to_string(), expected, "{text}");
        };
        check("  ", "the command is empty");
        check("a 'b", "position 3: the quotation does not end");
        check("a {", "position 3: a brace that is not a placeholder (write {{ or }} for one that stays)");
        check("a }", "position 3: a brace that is not a placeholder (write {{ or }} for one that stays)");
        let known = "there are tile, dir (write {{ for a brace that stays)";
        check("a {til}", &format!("position 3: {{til}} is not a parameter; {known}"));
        let shell = "is for a shell, and this is started without one (add --shell, or quote it)";
        check("a | b", &format!("position 3: `|` {shell}"));
        check("a > b", &format!("position 3: `>` {shell}"));
        assert!(CommandTemplate::words("a '|' \"$x\"", &NAMES).is_ok());
        let alone = "{*tile} is the words of a value, and stands alone (write {tile} for a part of one)";
        for (text, position) in [("a -{*tile}", 4), ("a {*tile}b", 3), ("a \"{*tile}\"", 4), ("{*tile} a", 1)] {
            check(text, &format!("position {position}: {alone}"));
        }
        assert_eq!(
            CommandTemplate::shell("a '{*tile}'", &NAMES).unwrap_err().to_string(),
            format!("position 4: {alone}")
        );
    }

    #[test]
    fn a_value_may_be_words_where_that_is_said() {
        let flags = |text: &'static str| move |_: &str| text.to_owned();
        let words =
            |text: &str, value: &'static str| CommandTemplate::words(text, &NAMES).unwrap().with(&flags(value)).words;
        assert_eq!(words("cc {*tile} a.c", "-O3  '-g'"), ["cc", "-O3", "'-g'", "a.c"]);
        assert_eq!(words("cc {*tile}", ""), ["cc"]);
        assert_eq!(words("cc {tile}", ""), ["cc", ""]);
        let shell = CommandTemplate::shell("printf '<%s>' a {*tile}; echo {tile}", &NAMES).unwrap();
        assert!(shell.reads("tile"));
        let run = |value: &'static str| {
            let Invocation { words, variables, .. } = shell.with(&flags(value));
            let output = std::process::Command::new(&words[0]).args(&words[1..]).envs(variables).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        assert_eq!(run("b $(c)"), "<a><b><$(c)>b $(c)\n");
        assert_eq!(run(""), "<a>\n");
    }

    /// A shell gets values that would do harm if it interpreted them.
    #[test]
    fn no_value_is_read_as_code() {
        let script = "printf '%s\\n' {tile} \"{tile}\" '{tile}' a{tile}b \"$(printf '%s' \"{tile}\")\" \"${HOME}\"";
        let command = CommandTemplate::shell(script, &NAMES).unwrap().with(&value);
        let run = |words: &[String], variables: &[(String, String)]| {
            let mut command = std::process::Command::new(&words[0]);
            command.args(&words[1..]).envs(variables.iter().cloned()).env("HOME", "/home");
            String::from_utf8(command.output().unwrap().stdout).unwrap()
        };
        let tile = value("tile");
        // Quotes in a substitution in quotes end those around it, and the value is split into words.
        let divided = tile.replace(' ', "");
        let expected = format!("{tile}\n{tile}\n{tile}\na{tile}b\n{divided}\n/home\n");
        assert_eq!(run(&command.words, &command.variables), expected);
        // The recorded form has the same effect.
        let again = command.to_string();
        assert_eq!(run(&["sh", "-c", &again].map(str::to_owned), &[]), expected, "{again}");
        assert!(!CommandTemplate::shell("a", &NAMES).unwrap().reads("tile"));
        assert!(CommandTemplate::shell("a {tile}", &NAMES).unwrap().reads("tile"));
    }
}
