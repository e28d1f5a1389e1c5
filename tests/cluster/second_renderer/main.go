// Renders a chart's templates as Helm's engine does: Go's text/template with Sprig, and the few
// functions that Helm adds. JSON of {templates: {name: text}, files: {name: text}, context: {...}}
// on stdin, JSON of {name: rendered} on stdout; a template's error on stderr, with status 1.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"github.com/ghodss/yaml"
)

type files map[string]string

// Get is `.Files.Get` of templates.
func (f files) Get(name string) string { return f[name] }

type request struct {
	Templates map[string]string      `json:"templates"`
	Files     files                  `json:"files"`
	Context   map[string]interface{} `json:"context"`
}

func toYaml(value interface{}) string {
	text, err := yaml.Marshal(value)
	if err != nil {
		return "" // as Helm's
	}
	return strings.TrimSuffix(string(text), "\n")
}

func fromYaml(text string) map[string]interface{} {
	found := map[string]interface{}{}
	if err := yaml.Unmarshal([]byte(text), &found); err != nil {
		found["Error"] = err.Error() // as Helm's
	}
	return found
}

func render(asked request) (map[string]string, error) {
	all := template.New("chart").Option("missingkey=zero")
	functions := sprig.TxtFuncMap()
	delete(functions, "env") // Helm has neither
	delete(functions, "expandenv")
	functions["toYaml"], functions["fromYaml"] = toYaml, fromYaml
	functions["include"] = func(name string, data interface{}) (string, error) {
		var out bytes.Buffer
		err := all.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	functions["required"] = func(why string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return value, fmt.Errorf("%s", why)
		}
		return value, nil
	}
	all.Funcs(functions)
	for name, text := range asked.Templates {
		if _, err := all.New(name).Parse(text); err != nil {
			return nil, err
		}
	}
	asked.Context["Files"] = asked.Files
	rendered := map[string]string{}
	for name := range asked.Templates {
		if strings.HasSuffix(name, ".tpl") {
			continue
		}
		var out bytes.Buffer
		if err := all.ExecuteTemplate(&out, name, asked.Context); err != nil {
			return nil, err
		}
		rendered[name] = strings.ReplaceAll(out.String(), "<no value>", "")
	}
	return rendered, nil
}

func main() {
	var asked request
	err := json.NewDecoder(os.Stdin).Decode(&asked)
	if err == nil {
		var rendered map[string]string
		if rendered, err = render(asked); err == nil {
			err = json.NewEncoder(os.Stdout).Encode(rendered)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
